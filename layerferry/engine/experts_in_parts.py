"""Layers whose experts are never whole on the device: their parts pass by while all micro-batches of a wave wait.

The body of such a layer, what is no expert, stays in a layer's slot while its experts pass through slots of their own.

- **Up.** The layer runs to find out what its experts are asked (``models/experts_in_parts.py``); each part in turn adds its share
  of the answers, for every micro-batch; then the layer runs again with the answers. Nothing stays but its input.
- **Down.** The answers again, the same way. A run of the layer with the answers as a leaf gives dL/d(answers), from which each
  part, last to first, so that those at the turn are still there, has its own gradient and its share of dL/d(hidden) and
  dL/d(weights). A last run of the body takes these down into its own parameters and its input.

So the body's forward runs twice on the way up and three times down, with the graph of one micro-batch at a time, that of the
experts once and twice. Sums over experts have another order than in a whole layer, and one rounding: the same bits for the same
number of parts, whatever slots, waves and places of what travels. Whole layers, and so those at home, are ``sweep.py``'s. Checked
by ``tests/engine/test_experts_in_parts.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerferry.config import Pins
from layerferry.engine.drain import Drain
from layerferry.engine.feed import Feed
from layerferry.engine.gradients import gradients_of
from layerferry.engine.one_layer import FedLayer, OneLayer
from layerferry.engine.sizes import pieces_of
from layerferry.engine.wave import Pass, Wave
from layerferry.errors import PlanError
from layerferry.models.experts_in_parts import Asked, ExpertsTap, SomeExperts, count_pairs
from layerferry.plan import Plan
from layerferry.units import Part, Piece, Unit

WHOLE_LAYERS = ("mlp_chunk_tokens", "kept_attention", "turn_layers", "richer_layers")
"""Fields of a plan that need layers which are there whole."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """dL/d(what the experts were asked) of one micro-batch, to which each part adds its share."""

    by_hidden: Tensor  # [N, D] fp32 @device
    by_weights: Tensor  # [N, K] fp32 @device

    @classmethod
    def of(cls, asked: Asked) -> Pulled:
        """Nothing yet."""
        return cls(torch.zeros_like(asked.hidden, dtype=torch.float32), torch.zeros_like(asked.weights, dtype=torch.float32))

    def rounded(self, asked: Asked) -> tuple[Tensor, Tensor]:
        return self.by_hidden.to(asked.hidden.dtype), self.by_weights.to(asked.weights.dtype)


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The layers that are divided, their ``bodies`` and ``parts`` by layer index. Each way takes one of them, and all
    micro-batches of a wave."""

    layer: OneLayer
    feed: Feed
    drain: Drain
    bodies: Mapping[int, Piece]
    parts: Mapping[int, Sequence[Part]]

    @classmethod
    def of(cls, layer: OneLayer, feed: Feed, drain: Drain, plan: Plan) -> ExpertParts:
        """Of the layers that ``plan`` divides; none, where it divides none."""
        divided = {index: pieces_of(unit, plan) for index, unit in enumerate(layer.skeleton.layer_units)}
        divided = {index: pieces for index, pieces in divided.items() if len(pieces) > 1}
        parts = {index: [part for part in pieces[1:] if isinstance(part, Part)] for index, pieces in divided.items()}
        return cls(layer, feed, drain, {index: pieces[0] for index, pieces in divided.items()}, parts)

    def upwards(self, layers: Iterable[tuple[int, Unit]]) -> list[Piece]:
        """In the order in which a forward feeds these layers."""
        found: list[Piece] = []
        for index, unit in layers:
            found += [self.bodies[index], *self.parts[index]] if index in self.parts else [unit]
        return found

    def downwards(self, layers: Iterable[tuple[int, Unit]]) -> list[Piece]:
        """The same of a backward."""
        found: list[Piece] = []
        for index, unit in layers:
            found += [*self.upwards([(index, unit)]), *reversed(self.parts.get(index, ()))]
        return found

    def drained(self, layers: Iterable[tuple[int, Unit]]) -> list[Piece]:
        """In the order in which gradients of these layers leave."""
        found: list[Piece] = []
        for index, unit in layers:
            found += [*reversed(self.parts.get(index, ())), self.bodies.get(index, unit)]
        return found

    # ---------------------------------------------------------------- the ways

    def forward(self, index: int, passes: Sequence[Pass], wave: Wave) -> None:
        with self.feed(self.bodies[index]) as slot:
            layer = self.layer.fed(index, slot)
            asked = [self._ask(layer, run, run.hidden, wave) for run in passes]
            for run, values in zip(passes, self._answers(index, asked), strict=True):
                with _tap(layer).answering(values):
                    self.layer.up(layer, run, wave)

    def backward(self, index: int, passes: Sequence[Pass], wave: Wave) -> None:
        with self.feed(self.bodies[index]) as slot:
            layer = self.layer.fed(index, slot)
            inputs = [self.layer.kept.take(index, run.number) for run in passes]
            asked = [self._ask(layer, run, hidden, wave) for run, hidden in zip(passes, inputs, strict=True)]
            answers = list(self._answers(index, asked))
            ways = zip(passes, inputs, answers, strict=True)
            slopes = [self._slope(layer, run, hidden, values, wave) for run, hidden, values in ways]
            pulled = self._pull(index, passes, asked, slopes, wave)
            del slopes
            with self.drain(self.bodies[index], carry=wave.carry) as sums:
                for run, values, one, own in zip(passes, answers, asked, pulled, strict=True):
                    with _tap(layer).answering(values, own.rounded(one)):
                        self.layer.down_from(layer, inputs.pop(0), run, sums, wave)

    def evaluate(self, index: int, passes: Sequence[Pass]) -> None:
        with self.feed(self.bodies[index]) as slot:
            layer = self.layer.fed(index, slot)
            asked = []
            for run in passes:
                with _tap(layer).asking() as seen:
                    layer.template(run.hidden, run.calls[index].args, run.calls[index].kwargs, run.calls[index])
                asked += seen
            for run, values in zip(passes, self._answers(index, asked), strict=True):
                with _tap(layer).answering(values):
                    self.layer.evaluate(layer, run)

    # ---------------------------------------------------------------- the body

    def _ask(self, layer: FedLayer, run: Pass, hidden: Tensor, wave: Wave) -> Asked:
        """What the experts are asked. The layer runs as it will with the answers: kernels choose their way by what needs a
        gradient."""
        unit, template, call = layer.unit, layer.template, run.calls[layer.index]
        self.layer.seed(layer, run, wave)
        with _tap(layer).asking() as asked:
            if layer.index < self.layer.skeleton.reach.num_below:
                wave.tape.pass_below(unit, run.number, template, hidden, call)
            else:
                wave.tape.rehearse(unit, template, hidden, call)
        return asked[0]

    def _slope(self, layer: FedLayer, run: Pass, hidden: Tensor, values: Tensor, wave: Wave) -> Tensor:
        """dL/d(answers) [N, D]."""
        leaf = values.detach().requires_grad_(True)
        self.layer.seed(layer, run, wave)
        with _tap(layer).answering(leaf):
            gradients = layer.gradients(run)
            return wave.tape.slope(layer.unit, layer.template, hidden, run.calls[layer.index], leaf, gradients)

    # ---------------------------------------------------------------- the parts

    def _answers(self, index: int, asked: Sequence[Asked]) -> Iterator[Tensor]:
        """Of each micro-batch [N, D], rounded once."""
        count_pairs(asked)
        sums = [torch.zeros_like(one.hidden, dtype=torch.float32) for one in asked]
        for part in self.parts[index]:
            with self.feed(part) as slot, torch.no_grad():
                experts = self.layer.templates.experts(index, part, slot)
                for one, own in zip(asked, sums, strict=True):
                    pairs = one.pairs(experts.experts)
                    if len(pairs):
                        one.spread(experts(*one.chosen(pairs, experts.experts)), pairs, own)
        return (sums.pop(0).to(one.hidden.dtype) for one in asked)

    def _pull(
        self, index: int, passes: Sequence[Pass], asked: Sequence[Asked], slopes: Sequence[Tensor], wave: Wave
    ) -> list[Pulled]:
        pulled = [Pulled.of(one) for one in asked]
        for part in reversed(self.parts[index]):
            with self.feed(part) as slot, self.drain(part, carry=wave.carry) as sums:
                experts = self.layer.templates.experts(index, part, slot)
                for run, one, slope, own in zip(passes, asked, slopes, pulled, strict=True):
                    wave.tape.add(part, run.number, _pull_one(experts, one, slope, own), sums)
        return pulled


def _pull_one(experts: SomeExperts, asked: Asked, slope: Tensor, pulled: Pulled) -> Sequence[Tensor | None]:
    """One micro-batch's gradient through the experts of a part: what it gives to ``pulled``, and by the part's parameters."""
    pairs = asked.pairs(experts.experts)
    if not len(pairs):
        return [None] * len(experts.parameters)
    hidden, index, weights = asked.chosen(pairs, experts.experts)
    leaves = [hidden.requires_grad_(True), weights.requires_grad_(True)]
    with torch.enable_grad():
        values = experts(hidden, index, weights)
    given = slope.index_select(0, asked.tokens(pairs)).to(values.dtype)
    by_hidden, by_weights, *by_tables = gradients_of([values], [*leaves, *experts.parameters], [given])
    if by_hidden is not None:
        asked.spread(by_hidden, pairs, pulled.by_hidden)
    if by_weights is not None:
        pulled.by_weights.view(-1).index_copy_(0, pairs, by_weights.float())
    return by_tables


def _tap(layer: FedLayer) -> ExpertsTap:
    tap = layer.template.experts
    assert tap is not None, "a layer in parts has a template without experts"
    return tap


def refuse_undividable_layers(parts: int, kind: str, reason: str | None) -> None:
    """Raise ``PlanError`` where layers are wanted in ``parts`` that can only be fed whole, for ``reason`` (``undividable``)."""
    if parts > 1 and reason is not None:
        raise PlanError(f"expert_parts: {parts}: {kind}: {reason}: expert_parts: 1 feeds its layers whole")


def refuse_whole_layers(wanted: Plan | Pins) -> None:
    """Raise ``PlanError`` where layers in parts are wanted together with what needs them whole."""
    if (wanted.expert_parts or 1) == 1:
        return
    for name in WHOLE_LAYERS:
        if value := getattr(wanted, name):
            raise PlanError(f"{name}: {value}: with expert_parts every layer is computed again, in parts; leave one of them out")
