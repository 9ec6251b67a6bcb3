"""The oracle: the whole model, plain autograd, no streaming. What the engine must equal.

Nothing of the engine is used: the Hugging Face model computes its own logits, torch's cross entropy the loss,
``torch.autograd`` the gradients of each micro-batch, and their sum is taken in fp32 in the order that the engine promises:
micro-batches in turn; a tied weight's shares from the head first, then those of the embedding. With ``WholeRows`` as the
engine's objective both do the same operations on the same shapes, so on the CPU they are equal to the last bit on every
family of the conformance list. (The engine's own objective leaves untrained tokens out of the head, which changes the order
of a few sums.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerferry.engine.batch import IGNORE_INDEX, MicroBatch
from layerferry.engine.feed import Slot, SlotPool
from layerferry.engine.gradients import gradients_of
from layerferry.engine.randomness import seed_of
from layerferry.models.build import locations
from layerferry.models.stack import find_stack
from layerferry.objectives.head import Head
from layerferry.units import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layerferry.engine.engine import Engine


def loss_and_gradients(model: PreTrainedModel, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Token-mean loss over all micro-batches [] fp32, and every gradient in fp32 by parameter name (zeros where autograd
    gives none)."""
    denominator = sum(micro_batch.num_targets for micro_batch in micro_batches)
    names, parameters = zip(*model.named_parameters(), strict=True)
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in model.named_parameters()}
    total = torch.zeros((), device=parameters[0].device)
    later: list[tuple[str, Tensor]] = []
    with _look_ups_of_tied_weights(model) as own:
        for micro_batch in micro_batches:
            loss = step_loss(model, micro_batch, denominator)
            found = gradients_of([loss], [*parameters, *own.values()], [None])
            total = total + loss.detach()
            for name, gradient in zip(names, found, strict=False):
                if gradient is not None:
                    sums[name] += gradient
            later += [(name, g) for name, g in zip(own, found[len(names) :], strict=True) if g is not None]
    for name, gradient in later:
        sums[name] += gradient
    return total, sums


def step_loss(model: PreTrainedModel, micro_batch: MicroBatch, denominator: float) -> Tensor:
    """One micro-batch's share of the step's loss [] fp32, with the family's load-balancing loss where the config asks for
    it."""
    ids = micro_batch.input_ids
    given: dict[str, Any] = {"input_ids": ids}
    if micro_batch.position_ids is not None:
        given["position_ids"] = micro_batch.position_ids
        if not micro_batch.isolated:
            given["attention_mask"] = torch.ones_like(ids)
    balances = bool(getattr(model.config, "output_router_logits", False))
    if balances:
        given["attention_mask"] = (torch.arange(ids.shape[1])[None, :] < micro_batch.lengths[:, None]).to(ids.dtype)
    device = next(model.parameters()).device
    output = model(**{name: value.to(device) for name, value in given.items()}, use_cache=False)
    loss = _summed(output.logits, micro_batch.labels.to(device)) / denominator
    if balances and getattr(output, "aux_loss", None) is not None:
        weight = model.router_aux_loss_coef if hasattr(model, "router_aux_loss_coef") else model.aux_loss_coef
        loss = loss + float(weight) * (micro_batch.num_targets / int(denominator)) * output.aux_loss
    return loss


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropies of every token but the first: logits [B, T, V], labels [B, T]."""
    targets = labels[:, 1:].reshape(-1)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")


@contextmanager
def _look_ups_of_tied_weights(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """For a while every tied weight has a copy where it is looked up; yields the copies by the weight's name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {key: places for key, places in locations(model).items() if len(places) > 1}
    own: dict[str, nn.Parameter] = {}
    for key, ((module, leaf), *_) in tied.items():
        weight = module._parameters[leaf]
        assert weight is not None
        own[names[key]] = module._parameters[leaf] = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    try:
        yield own
    finally:
        for (module, leaf), (other, other_leaf), *_ in tied.values():
            module._parameters[leaf] = other._parameters[other_leaf]


@contextmanager
def drawing_by_place(model: PreTrainedModel, *, step: int, seed: int) -> Iterator[None]:
    """Random numbers (dropout, sampling routers) as the engine draws them: seeded by (run, step, unit, micro-batch)."""
    _, layers = find_stack(model, model.config)
    step_seed = seed_of(seed, step)
    number = -1

    def before_model(*_: Any) -> None:
        nonlocal number
        number += 1
        torch.manual_seed(seed_of(step_seed, 0, number))

    def before_layer(index: int) -> Callable[..., None]:
        def reseed(*_: Any) -> None:
            torch.manual_seed(seed_of(step_seed, 1 + index, number))

        return reseed

    handles = [model.register_forward_pre_hook(before_model)]
    handles += [layer.register_forward_pre_hook(before_layer(index)) for index, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class OtherSlots(SlotPool):
    """The feed's slots in the worst order: content is never used twice, and a unit never lands where it was before.

    The feed's own order is so regular that a layer's backward runs in the slot of its forward, where even a tape without
    handles would read the right weights. With two of these slots it never does.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.expected, self.assigned = deque(), deque()
        self._last: dict[int, Slot] = {}

    def holding(self, piece: Piece) -> Slot | None:
        return None

    def victim(self) -> Slot | None:
        piece = self.expected[0]
        chosen = next((slot for slot in self.slots if not slot.claims and slot is not self._last.get(piece.index)), None)
        if chosen is not None:
            self._last[piece.index] = chosen
        return chosen

    @classmethod
    def take_over(cls, engine: Engine) -> None:
        """Layers of ``engine`` are fed in this order from now on."""
        layers = engine.skeleton.layer_units
        own = cls(engine.feed.pool_of[layers[0].buffers].slots)
        engine.feed.pool_of.update({unit.buffers: own for unit in layers})


class WholeRows:
    """The engine's cross entropy with the oracle's shapes: every token of a micro-batch through the head at once."""

    def denominator(self, micro_batches: Sequence[MicroBatch]) -> float:
        return float(sum(micro_batch.num_targets for micro_batch in micro_batches))

    def step(self, head: Head, hidden: Tensor, micro_batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        leaf = hidden.detach().reshape(-1, hidden.shape[-1]).requires_grad_(True)
        loss = self._loss(head, leaf, micro_batch) / denominator
        return loss.detach(), head.backward(loss, leaf).view_as(hidden)

    def evaluate(self, head: Head, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        return self._loss(head, hidden.reshape(-1, hidden.shape[-1]), micro_batch)

    def _loss(self, head: Head, flat: Tensor, micro_batch: MicroBatch) -> Tensor:
        rows, tokens = micro_batch.labels.shape
        return _summed(head.logits(flat).view(rows, tokens, -1), micro_batch.labels.to(flat.device))
