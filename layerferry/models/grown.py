"""New rows for new tokens: a checkpoint seen with a longer vocabulary.

A new row starts as the mean of the known rows plus normal noise of standard deviation 1/sqrt(D), as LLaMA-Factory's
``resize_vocab`` does, so that new tokens are neither all alike nor far from the others. The vocabulary is rounded up to a
multiple of 64 (the head's matmul likes it). Seeded: the same rows every time. Checked by ``tests/models/test_grown.py``.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from layerferry.errors import CheckpointError
from layerferry.layout import round_up

ROWS_MULTIPLE = 64


class Source(Protocol):
    """Parameters by model name."""

    def load(self, name: str) -> Tensor: ...

    def num_bytes(self, name: str) -> int: ...


def grown_rows(num_tokens: int) -> int:
    """Rows of a resized vocabulary that holds ``num_tokens``."""
    return round_up(num_tokens, ROWS_MULTIPLE)


class GrownSource:
    """``source`` with more vocabulary rows: ``shapes`` are those of the grown model, by parameter name."""

    def __init__(self, source: Source, model: Any, *, old_rows: int, seed: int) -> None:
        self._source, self._old_rows, self._seed = source, old_rows, seed
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def num_bytes(self, name: str) -> int:
        return self._source.num_bytes(name)

    def load(self, name: str) -> Tensor:
        value = self._source.load(name)
        wanted = self._shapes.get(name, tuple(value.shape))
        if tuple(value.shape) == wanted:
            return value
        if value.shape[0] != self._old_rows or tuple(value.shape[1:]) != wanted[1:]:
            raise CheckpointError(f"resize_vocab: {name} has shape {tuple(value.shape)}, and cannot become {wanted}")
        mean = value.float().mean(0, keepdim=True)
        new = mean.expand(wanted[0] - self._old_rows, *wanted[1:]).clone()
        if new.dim() > 1:  # a bias row starts at the mean
            generator = torch.Generator().manual_seed(self._seed)
            new += torch.randn(new.shape, generator=generator) / math.sqrt(wanted[1])
        return torch.cat([value, new.to(value.dtype)])
