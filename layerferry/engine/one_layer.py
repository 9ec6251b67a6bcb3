"""One micro-batch through one layer whose weights are in a slot: up, down, and in an evaluation.

Both ways of feeding layers end here, whole ones (``sweep.py``) and those whose experts travel in parts (``experts_in_parts.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from layerferry.backends.base import Backend
from layerferry.engine.feed import Slot
from layerferry.engine.isolation import IsolationCheck
from layerferry.engine.kept import KeptInputs
from layerferry.engine.randomness import seed_of
from layerferry.engine.templates import Templates
from layerferry.engine.wave import Pass, Wave
from layerferry.layout import Plane
from layerferry.models.skeleton import Skeleton
from layerferry.models.template import Template
from layerferry.units import Unit


@dataclass(frozen=True, slots=True)
class FedLayer:
    """A layer whose weights are in ``slot``, and the template that computes with them."""

    unit: Unit
    index: int
    slot: Slot
    template: Template

    def gradients(self, run: Pass) -> Sequence[Tensor]:
        """dL/d(output), then by the logits of its routers."""
        assert run.gradient is not None
        return [run.gradient, *run.router_gradients.get(self.unit.index, ())]


@dataclass(frozen=True, slots=True)
class OneLayer:
    """What a layer does, whichever it is."""

    skeleton: Skeleton
    backend: Backend
    kept: KeptInputs
    templates: Templates
    isolation: IsolationCheck

    def fed(self, index: int, slot: Slot) -> FedLayer:
        """Layer ``index``, whose weights have come to ``slot``."""
        return FedLayer(self.skeleton.layer_units[index], index, slot, self.templates.bound(index, slot))

    def seed(self, layer: FedLayer, run: Pass, wave: Wave) -> None:
        """What the layer draws is the same however often it runs."""
        self.backend.seed(seed_of(wave.step_seed, layer.unit.index, run.number))

    def up(self, layer: FedLayer, run: Pass, wave: Wave) -> None:
        """One micro-batch through one layer."""
        unit, index, template, tape = layer.unit, layer.index, layer.template, wave.tape
        with tape.record(unit, layer.slot):
            if run.micro_batch.isolated:
                with tape.resolving(unit, layer.slot):
                    self.isolation.check(template, self.skeleton.keys[index], run.micro_batch, run.hidden, run.calls[index])
            self.seed(layer, run, wave)
            if index < self.skeleton.reach.num_below:
                run.hidden = tape.pass_below(unit, run.number, template, run.hidden, run.calls[index])
            elif self.kept.rebuilds(index):
                self.kept.send(unit, index, run.number, run.hidden)
                with template.recording(self.kept.attention_of(index, run.number)):
                    run.hidden = tape.pass_on(unit, run.number, template, run.hidden, run.calls[index])
            else:
                run.hidden = tape.forward(unit, run.number, template, run.hidden, run.calls[index])

    def down(self, layer: FedLayer, run: Pass, sums: Plane, wave: Wave) -> None:
        """One micro-batch's gradient through one layer: by the graph that it left, or one that is made again from the input that
        comes back."""
        if not self.kept.rebuilds(layer.index):
            self._backward(layer, run, sums, wave)
            return
        with self.kept.bring_back(layer.index, run.number) as hidden:
            self.down_from(layer, hidden, run, sums, wave)

    def down_from(self, layer: FedLayer, hidden: Tensor, run: Pass, sums: Plane, wave: Wave) -> None:
        """The same from the layer's input ``hidden`` [B, T, D]."""
        unit, index, template = layer.unit, layer.index, layer.template
        self.seed(layer, run, wave)
        with wave.tape.record(unit, layer.slot), template.answering(self.kept.attention_of(index, run.number)):
            wave.tape.run_again(unit, run.number, template, hidden, run.calls[index])
        self._backward(layer, run, sums, wave)

    def _backward(self, layer: FedLayer, run: Pass, sums: Plane, wave: Wave) -> None:
        unit, tape = layer.unit, wave.tape
        with tape.resolving(unit, layer.slot):
            run.gradient = tape.backward(unit, run.number, layer.template, layer.gradients(run), sums, run.sides)

    def evaluate(self, layer: FedLayer, run: Pass) -> None:
        """One micro-batch of an evaluation through one layer."""
        call = run.calls[layer.index]
        if run.micro_batch.isolated:
            self.isolation.check(layer.template, self.skeleton.keys[layer.index], run.micro_batch, run.hidden, call)
        run.hidden = layer.template(run.hidden, call.args, call.kwargs, call)
        run.routed += layer.template.routed
