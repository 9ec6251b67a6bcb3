"""The fp32 master weight as two planes: a bf16 weight, which is uploaded as it stands, and an int16 residue, which stays home.

``weight`` is the master rounded half up on its bits (ties differ from ``.to(torch.bfloat16)``, which rounds half to even);
``residue`` is what is missing, as a signed 16-bit number of fp32 ulps: master bits = (weight bits << 16) + residue.

Exact for every fp32 value but NaN payloads: finite values, denormals, both zeros and both infinities come back bit for bit. A
finite master from 3.3961e38 up has an infinite bf16 weight, as under any rounding to nearest, and still comes back. Every NaN
becomes the one quiet NaN 0x7fc00000 (residue 0): an all-ones NaN, what CUDA produces, would else round up to a weight of -0.0.
A bf16 value is its own weight, with residue 0.

A leaner master keeps 24 bits (``residue`` int8: the next 8 bits below the weight) or the weight alone (no residue); it is rounded
to nearest here, where masters are loaded, and stochastically where they are updated (``optim/reference.py``).

This is the one definition; loaders and oracles use it, ``Kernels.split`` and ``Kernels.join`` are the same over whole
planes without temporaries, and ``tests/test_master.py`` holds all of them to all 2**16 upper halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUIET_NAN_BITS = 0x7FC00000


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 of any shape → (weight bf16, residue int16) of that shape and place."""
    bits = master_bits(master)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def split_master24(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 of any shape → (weight bf16, residue int8), the 24 bits rounded half up."""
    return split_kept((master_bits(master).to(torch.int64) & 0xFFFFFFFF) + 0x80 >> 8)


def split_kept(kept: Tensor) -> tuple[Tensor, Tensor]:
    """The upper 24 bits of a master, int64 → (weight bf16, residue int8)."""
    high = (kept + 0x80) >> 8
    return high.to(torch.int16).view(torch.bfloat16), (kept - (high << 8)).to(torch.int8)


def master_bits(master: Tensor) -> Tensor:
    """fp32 → its bits as int32, every NaN the one quiet NaN."""
    assert master.dtype == torch.float32
    return torch.where(master.isnan(), QUIET_NAN_BITS, master.contiguous().view(torch.int32))


def join_master(weight: Tensor, residue: Tensor) -> Tensor:
    """(weight bf16, residue int16 or int8) → fp32 of their shape and place."""
    assert weight.dtype == torch.bfloat16 and residue.dtype in (torch.int16, torch.int8)
    low = residue.to(torch.int32)
    if residue.dtype == torch.int8:
        low = low << 8
    return ((weight.contiguous().view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)
