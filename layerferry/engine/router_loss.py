"""The load-balancing loss of one step: each micro-batch's share of it, and its gradient by router logits.

A family's loss is a mean over the real tokens of what it is given, so it does not add up over micro-batches; each counts with its
share of the step's trained tokens. One micro-batch is then exactly Hugging Face's ``loss + coefficient * aux_loss``.
The gradients go into the backward of each layer beside those of its hidden states (``tape.backward``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerferry.engine.batch import MicroBatch
from layerferry.models.router_balance import RouterBalance


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """``shares[number]`` of the micro-batches of a step; they sum to 1."""

    balance: RouterBalance
    shares: tuple[float, ...]

    @classmethod
    def of(cls, balance: RouterBalance | None, micro_batches: Sequence[MicroBatch]) -> RouterLoss | None:
        """None for a model without such a loss."""
        if balance is None:
            return None
        counts = [micro_batch.num_targets for micro_batch in micro_batches]
        if not sum(counts):  # a loss of the user's own may do without labels
            counts = [micro_batch.num_tokens for micro_batch in micro_batches]
        return cls(balance, tuple(count / sum(counts) for count in counts))

    def step(self, logits: Sequence[Tensor], micro_batch: MicroBatch, number: int) -> tuple[Tensor, list[Tensor]]:
        """``logits`` of every router, in layer order, without graph -> (share of the loss [], its gradient by each)."""
        leaves = [tensor.detach().requires_grad_(True) for tensor in logits]
        with torch.enable_grad():
            loss = self._weighted(leaves, micro_batch, number)
        return loss.detach(), list(torch.autograd.grad(loss, leaves))

    def evaluate(self, logits: Sequence[Tensor], micro_batch: MicroBatch, number: int) -> Tensor:
        """Share of the loss []."""
        with torch.no_grad():
            return self._weighted(logits, micro_batch, number)

    def _weighted(self, logits: Sequence[Tensor], micro_batch: MicroBatch, number: int) -> Tensor:
        mask = (torch.arange(micro_batch.input_ids.shape[1])[None, :] < micro_batch.lengths[:, None]).to(torch.int64)
        loss = self.balance.loss(logits, mask.to(logits[0].device, non_blocking=True))
        return self.balance.coefficient * self.shares[number] * loss
