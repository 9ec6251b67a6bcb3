"""Random numbers for stochastic rounding: a hash of who asks and where, no state.

What is cut off a moment or a master is rounded up with the probability of its size, so that the value is right on average: a
moment that moves by a thousandth of itself, or a weight by less than its last bit, still moves. The 32 bits of an element come
from the key (seed, step, unit) and its place in the unit. So threads, the order of units and the plan change nothing, and a
resumed run draws what the whole run would have drawn. Two layers of hashing by block of 128, then by element: a block's key is
computed once: two words that stir those of the 128 lanes by an exclusive or and one multiplication (universal hashing with a
new function a block), because ten operations an element would be a tenth of the update. The hash of keys and lanes is Wellons'
lowbias32, full avalanche in two multiplications. Checked by ``tests/optim/test_rounding.py``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from layerferry.layout import BLOCK_ELEMENTS

GOLDEN = 0x9E3779B9
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The key of one update of one unit, two words of 32 bits."""

    key_low: int
    key_high: int

    @classmethod
    def of(cls, *, seed: int, step: int, stream: int) -> Rounding:
        """``stream`` tells units apart."""
        digest = hashlib.sha256(f"{seed} {step} {stream}".encode()).digest()
        return cls(key_low=int.from_bytes(digest[:4], "little"), key_high=int.from_bytes(digest[4:8], "little"))


def random_words(rounding: Rounding, start: int, numel: int, device: torch.device) -> Tensor:
    """32 random bits for each of ``numel`` elements from ``start`` on (whole blocks), [numel] int64."""
    assert start % BLOCK_ELEMENTS == 0 and numel % BLOCK_ELEMENTS == 0
    blocks = torch.arange(start // BLOCK_ELEMENTS, (start + numel) // BLOCK_ELEMENTS, dtype=torch.int64, device=device)
    keys = hashed(hashed((blocks & _WORD) + rounding.key_low) + (blocks >> 32) + rounding.key_high)
    factors = hashed(keys + GOLDEN) | 1
    lanes = hashed(torch.arange(BLOCK_ELEMENTS, dtype=torch.int64, device=device) * GOLDEN)
    words = _times(lanes ^ keys[:, None], factors[:, None])
    return (words ^ (words >> 16)).view(-1)


def for_exp_avg(words: Tensor) -> Tensor:
    """20 bits of each word, as ``blocks.encode`` takes them."""
    return words >> 12


def for_exp_avg_sq(words: Tensor) -> Tensor:
    return words & 0xFFFFF


def for_master(words: Tensor, bits: int) -> Tensor:
    """8 bits for a master of 24, 16 for bf16: of those that weigh least in ``for_exp_avg_sq``."""
    return (words >> 4) & 0xFF if bits == 8 else words & 0xFFFF


def hashed(words: Tensor) -> Tensor:
    """lowbias32 of the low 32 bits, as int64 in [0, 2**32)."""
    x = words & _WORD
    x = x ^ (x >> 16)
    x = _times(x, 0x21F0AAAD)
    x = x ^ (x >> 15)
    x = _times(x, 0x735A2D97)
    return x ^ (x >> 15)


def _times(words: Tensor, factor: int | Tensor) -> Tensor:
    """The low 32 bits of the product, without an overflow of 63."""
    return ((words & 0xFFFF) * factor + (((words >> 16) * factor & 0xFFFF) << 16)) & _WORD


def signed(word: int) -> int:
    """The same 32 bits as an int32: a kernel's argument has one type then, whatever its value."""
    return word - (1 << 32) if word >= 1 << 31 else word
