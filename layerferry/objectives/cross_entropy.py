"""Token cross entropy for stages ``pt`` and ``sft``: the mean over all trained tokens of the whole step.

The reference is ``OnLogits`` with torch's cross entropy. Where a numerical check shows that the epilogue is a plain linear
head, up to a scale or soft-cap, ``fused_linear`` computes the same with the gradient in the forward; it is used on CUDA
only, and a test compares the two. A head that is fed in parts is computed in two passes over them (``head_in_parts``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from layerferry.engine.batch import MicroBatch
from layerferry.errors import ModelRefused
from layerferry.models.skeleton import Skeleton
from layerferry.objectives.custom import OnLogits
from layerferry.objectives.fused_linear import PROBE_TOKENS, FusedLinear
from layerferry.objectives.head import Head, Targets
from layerferry.objectives.head_in_parts import HeadInParts


class CrossEntropy:
    """Next-token cross entropy. ``fused`` None: the fused linear head on CUDA, the reference elsewhere."""

    def __init__(self, *, fused: bool | None = None) -> None:
        self._wants_fused = fused
        self._fused: FusedLinear | None = None
        self._fused_of: Skeleton | None = None  # the model that was asked for a fused form
        self._in_parts: HeadInParts | None = None
        self._in_parts_of: Skeleton | None = None
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
        if self._fused_of is not head.skeleton:
            few = flat.index_select(0, targets.rows[: head.chunk_tokens])
            self._fused, self._fused_of = FusedLinear.of(head, few), head.skeleton
        if self._fused is None:
            return self._reference.step(head, hidden, micro_batch, denominator)
        loss = torch.zeros((), device=hidden.device)
        for part in head.chunks(len(targets)):  # beside the gradient itself, nothing is as long as the micro-batch
            rows = targets.rows[part]
            share, found = self._fused.step(head, flat.index_select(0, rows), targets.labels[part], denominator)
            loss = loss + share
            gradient.index_copy_(0, rows, found)
        return loss, gradient.view_as(hidden)

    def in_parts(self, head: Head) -> HeadInParts:
        """The same over a head in parts, whichever device."""
        if self._in_parts is None or self._in_parts_of is not head.skeleton:
            weight, _ = head.skeleton.head_weight()
            sample = torch.randn(PROBE_TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(0))
            found = FusedLinear.of(head, sample.to(weight.device, weight.dtype))
            if found is None:
                raise ModelRefused(
                    f"{head.skeleton.config.model_type}: logits of some rows of the head are not those of a linear head: "
                    "end_parts: 1 feeds it whole"
                )
            self._in_parts, self._in_parts_of = HeadInParts(found.shape, compiled=weight.is_cuda), head.skeleton
        return self._in_parts

    def evaluate(self, head: Head, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        return self._reference.evaluate(head, hidden, micro_batch)


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")
