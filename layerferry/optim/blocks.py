"""Moments of 8 bits: blocks of 128 numbers that share an exponent, each number a small float below it.

The idea is block-wise quantisation (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861): a block's
outlier spoils its own block only, and the code is fine near zero, because an element's update divides one moment by the root of
the other, whatever its size beside its neighbours; a linear code for exp_avg_sq is known to harm. Theirs is a table of 256
numbers and an fp32 scale; ours are the top bits of the fp32 number itself, so that both ways are integer operations:

    exp_avg     sign, 4 bits of exponent, 3 of mantissa: 16 octaves below the block's largest, zero below those
    exp_avg_sq  5 bits of exponent, 3 of mantissa: 32 octaves (the same 16 of the gradient), and never zero unless the number is,
                because an update divided by eps would be enormous: what is smaller becomes the smallest

Code 0 is zero; the exponent byte is one less than the biased fp32 exponent that a code's own exponent 0 stands for. Within the
octaves a code is off by 1/16 of the number at most if rounded to nearest, by 1/8 if stochastically, and right on average.
Here in torch: the meaning of ``native/formats.cpp`` and ``triton_formats.py``. Checked by ``tests/optim/test_blocks.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.master import QUIET_NAN_BITS

SIGNED_OCTAVES, UNSIGNED_OCTAVES = 16, 32
_DROPPED = 20
"""Bits of an fp32 number that a code does not hold: 23 of mantissa but 3."""
_HALF = 1 << (_DROPPED - 1)
_LAST = (1 << _DROPPED) - 1


def decode(codes: Tensor, exponents: Tensor, *, signed: bool) -> Tensor:
    """``codes`` [n] uint8, ``exponents`` [n / 128] uint8 → [n] fp32."""
    base = ((exponents.to(torch.int32) + 1) << 23).repeat_interleave(BLOCK_ELEMENTS)
    code = codes.to(torch.int32)
    magnitude = code & 0x7F if signed else code
    bits = torch.where(magnitude > 0, (magnitude << _DROPPED) + base, 0)
    if signed:
        bits = bits | ((code & 0x80) << 24)
    return bits.view(torch.float32)


def encode(values: Tensor, *, signed: bool, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[n] fp32 (whole blocks; not negative unless ``signed``; none denormal) → codes [n] uint8, exponents [n / 128] uint8.

    ``random`` [n] int64 in [0, 2**20) rounds stochastically; None: to nearest.
    """
    bits = torch.where(values.isnan(), QUIET_NAN_BITS, values.contiguous().view(torch.int32))
    size = (bits & 0x7FFFFFFF).to(torch.int64)
    largest = size.view(-1, BLOCK_ELEMENTS).amax(1)
    octaves = SIGNED_OCTAVES if signed else UNSIGNED_OCTAVES
    exponents = (((largest + _LAST) >> 23) - octaves).clamp(min=0)
    dither = _HALF if random is None else random
    code = ((size + dither) >> _DROPPED) - ((exponents + 1) << 3).repeat_interleave(BLOCK_ELEMENTS)
    signs, least = (bits < 0).to(torch.int64) << 7, (size > 0).to(torch.int64)
    code = code.clamp(min=0) | signs if signed else torch.maximum(code, least)
    return code.to(torch.uint8), exponents.to(torch.uint8)
