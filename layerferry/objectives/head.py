"""What an objective is given: the head of the bound model, some tokens at a time, and the tokens that carry loss.

Checked by ``tests/objectives/test_objectives.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerferry.engine.batch import IGNORE_INDEX, MicroBatch
from layerferry.engine.gradients import add_gradients, gradients_of
from layerferry.layout import Plane
from layerferry.models.skeleton import Skeleton


@dataclass(frozen=True, slots=True)
class Head:
    """The epilogue's model with weights in its slot. ``accumulator`` is None in evaluation."""

    skeleton: Skeleton
    parameters: Sequence[Tensor]  # bound, in layout order
    accumulator: Plane | None
    chunk_tokens: int

    def logits(self, hidden: Tensor) -> Tensor:
        """[C, D] -> [C, V] @device through final norm, head, caps and scales of the family."""
        return self.skeleton.logits(hidden)

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        for start in range(0, num_tokens, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, num_tokens))

    def backward(self, output: Tensor, inputs: Tensor, gradient: Tensor | None = None) -> Tensor:
        """dL/d(inputs) for dL/d(output) = ``gradient`` (None: output is the loss); adds the head's parameter gradients to
        the accumulator."""
        assert self.accumulator is not None
        found = gradients_of([output], [inputs, *self.parameters], [gradient])
        add_gradients(self.accumulator, found[1:])
        return torch.zeros_like(inputs) if found[0] is None else found[0]


@dataclass(frozen=True, slots=True)
class Targets:
    """The tokens of a micro-batch that carry loss, found @host so that the device is never asked."""

    rows: Tensor  # [C] int64 @device, index into B*T
    labels: Tensor  # [C] int64 @device

    @classmethod
    def of(cls, micro_batch: MicroBatch, device: torch.device) -> Targets:
        """Position t predicts the label at t + 1: the shift happens here and nowhere else."""
        shifted = torch.full_like(micro_batch.labels, IGNORE_INDEX)
        shifted[:, :-1] = micro_batch.labels[:, 1:]
        flat = shifted.flatten()
        rows = torch.nonzero(flat != IGNORE_INDEX).squeeze(1)
        return cls(rows.to(device, non_blocking=True), flat[rows].to(device, non_blocking=True))

    def __len__(self) -> int:
        return self.rows.numel()
