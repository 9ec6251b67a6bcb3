"""Token cross entropy for stages ``pt`` and ``sft``: the mean over all trained tokens of the whole step.

The reference is ``OnLogits`` with torch's cross entropy. Where a numerical check shows that the epilogue is a plain linear
head, up to a scale or soft-cap, ``fused_linear`` computes the same with the gradient in the forward; it is used on CUDA
only, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from layerferry.engine.batch import MicroBatch
from layerferry.models.skeleton import Skeleton
from layerferry.objectives.base import Head, Targets
from layerferry.objectives.custom import OnLogits
from layerferry.objectives.fused_linear import FusedLinear


class CrossEntropy:
    """Next-token cross entropy. ``fused`` None: the fused linear head on CUDA, the reference elsewhere."""

    def __init__(self, *, fused: bool | None = None) -> None:
        self._wants_fused = fused
        self._fused: FusedLinear | None = None
        self._fused_of: Skeleton | None = None  # the model that was asked for a fused form
        self._reference = OnLogits(_summed)

    def denominator(self, micro_batches: Sequence[MicroBatch]) -> float:
        return self._reference.denominator(micro_batches)

    def step(self, head: Head, hidden: Tensor, micro_batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        wanted = hidden.is_cuda if self._wants_fused is None else self._wants_fused
        if not wanted:
            return self._reference.step(head, hidden, micro_batch, denominator)
        targets = Targets.of(micro_batch, hidden.device)
        flat = hidden.reshape(-1, hidden.shape[-1])
        gradient = torch.zeros_like(flat)
        if not len(targets):
            return torch.zeros((), device=hidden.device), gradient.view_as(hidden)
        chosen = flat.index_select(0, targets.rows)
        if self._fused_of is not head.skeleton:
            self._fused, self._fused_of = FusedLinear.of(head, chosen), head.skeleton
        if self._fused is None:
            return self._reference.step(head, hidden, micro_batch, denominator)
        loss, found = self._fused.step(head, chosen, targets.labels, denominator)
        gradient.index_copy_(0, targets.rows, found)
        return loss, gradient.view_as(hidden)

    def evaluate(self, head: Head, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        return self._reference.evaluate(head, hidden, micro_batch)


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")
