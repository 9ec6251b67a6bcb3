"""From the last layer's hidden states to the loss and its gradient, in chunks of tokens: logits are never whole.

An objective is given the head of the bound model and returns the micro-batch's share of the loss and dL/d(hidden). Its
shares add up: a loss is a sum over tokens divided by a denominator that was counted over the whole step before it began, so
accumulation and chunking change nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from layerferry.engine.batch import MicroBatch
from layerferry.objectives.head import Head
from layerferry.objectives.head_in_parts import HeadInParts


class Objective(Protocol):
    """A loss. Stateless but for caches; one object may serve many steps."""

    def denominator(self, micro_batches: Sequence[MicroBatch]) -> float:
        """What the whole step's sum is divided by, counted before the step; 0 if nothing is trained."""
        ...

    def step(self, head: Head, hidden: Tensor, micro_batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        """hidden [B, T, D] @device -> (share of the loss [] fp32 @device, dL/dhidden [B, T, D] @device)."""
        ...

    def evaluate(self, head: Head, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Sum of the loss over the micro-batch [] fp32 @device, not divided."""
        ...


@runtime_checkable
class DividesHead(Protocol):
    """An objective that can do with some rows of the head at a time."""

    def in_parts(self, head: Head) -> HeadInParts:
        """``head``: with the first rows bound."""
        ...
