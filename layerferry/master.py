"""The fp32 master weight as two planes: a bf16 weight, which is uploaded as it stands, and an int16 residue, which stays home.

``weight`` is the master rounded half up on its bits (ties differ from ``.to(torch.bfloat16)``, which rounds half to even);
``residue`` is what is missing, as a signed 16-bit number of fp32 ulps: master bits = (weight bits << 16) + residue.

Exact for every fp32 value but NaN payloads: finite values, denormals, both zeros and both infinities come back bit for bit. A
finite master from 3.3961e38 up has an infinite bf16 weight, as under any rounding to nearest, and still comes back. Every NaN
becomes the one quiet NaN 0x7fc00000 (residue 0): an all-ones NaN, what CUDA produces, would else round up to a weight of -0.0.
A bf16 value is its own weight, with residue 0.

This is the one definition; loaders and oracles use it, ``Kernels.split`` and ``Kernels.join`` are the same over whole
planes without temporaries, and ``tests/test_master.py`` holds all of them to all 2**16 upper halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUIET_NAN_BITS = 0x7FC00000


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 of any shape → (weight bf16, residue int16) of that shape and place."""
    assert master.dtype == torch.float32
    bits = torch.where(master.isnan(), QUIET_NAN_BITS, master.contiguous().view(torch.int32))
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join_master(weight: Tensor, residue: Tensor) -> Tensor:
    """(weight bf16, residue int16) → fp32 of their shape and place."""
    assert weight.dtype == torch.bfloat16 and residue.dtype == torch.int16
    return ((weight.contiguous().view(torch.int16).to(torch.int32) << 16) + residue).view(torch.float32)
