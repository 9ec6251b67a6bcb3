"""Losses of your own, on chunked logits or on hidden states.

``OnLogits(f)``: ``f(logits [C, V], labels [C]) -> []`` is called on chunks of trained tokens and must be a *sum* over them;
the result is divided by the number of trained tokens of the whole step. ``OnHidden(f)``: ``f(hidden [B, T, D], micro_batch)
-> []`` sees whole rows before the final norm and is added up over micro-batches as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layerferry.engine.batch import MicroBatch
from layerferry.objectives.head import Head, Targets


class OnLogits:
    """A token loss as a plain function; gradients by autograd."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function = function

    def denominator(self, micro_batches: Sequence[MicroBatch]) -> float:
        return float(sum(micro_batch.num_targets for micro_batch in micro_batches))

    def step(self, head: Head, hidden: Tensor, micro_batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        targets = Targets.of(micro_batch, hidden.device)
        gradient = torch.zeros_like(flat)
        total = torch.zeros((), device=hidden.device)
        for part in head.chunks(len(targets)):
            rows = targets.rows[part]
            leaf = flat.index_select(0, rows).requires_grad_(True)
            loss = self._function(head.logits(leaf), targets.labels[part]) / denominator
            gradient.index_copy_(0, rows, head.backward(loss, leaf))
            total = total + loss.detach()
        return total, gradient.view_as(hidden)

    def evaluate(self, head: Head, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        targets = Targets.of(micro_batch, hidden.device)
        total = torch.zeros((), device=hidden.device)
        with torch.no_grad():
            for part in head.chunks(len(targets)):
                total = total + self._function(head.logits(flat.index_select(0, targets.rows[part])), targets.labels[part])
        return total


class OnHidden:
    """A loss on the last layer's hidden states; the head is not run."""

    def __init__(self, function: Callable[[Tensor, MicroBatch], Tensor]) -> None:
        self._function = function

    def denominator(self, micro_batches: Sequence[MicroBatch]) -> float:
        return 1.0

    def step(self, head: Head, hidden: Tensor, micro_batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        leaf = hidden.detach().requires_grad_(True)
        loss = self._function(leaf, micro_batch)
        return loss.detach().float(), head.backward(loss, leaf)

    def evaluate(self, head: Head, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self._function(hidden, micro_batch).float()
