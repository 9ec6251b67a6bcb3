"""A master in any of its formats, from planes to fp32 and back, in torch: the meaning of ``native/masters.h``.

Checked by ``tests/optim/test_formats.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerferry.master import join_master, master_bits, split_kept, split_master
from layerferry.optim.rounding import for_master


def load_master(weight: Tensor, residue: Tensor | None) -> Tensor:
    """The master as fp32; the weight itself where it is all there is and fp32."""
    return weight.to(torch.float32) if residue is None else join_master(weight, residue)


def store_master(master: Tensor, weight: Tensor, residue: Tensor | None, random: Tensor) -> None:
    """``random`` [n] int64, 32 bits each."""
    if weight.dtype == torch.float32:
        weight.copy_(master)
    elif residue is not None and residue.dtype == torch.int16:
        high, low = split_master(master)
        weight.copy_(high)
        residue.copy_(low)
    else:
        bits = master_bits(master).to(torch.int64) & 0xFFFFFFFF
        if residue is None:
            weight.copy_(((bits + for_master(random, 16)) >> 16).to(torch.int16).view(torch.bfloat16))
        else:
            high, low = split_kept((bits + for_master(random, 8)) >> 8)
            weight.copy_(high)
            residue.copy_(low)
