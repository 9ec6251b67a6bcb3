"""One template per behaviour, budget and slot, bound to a layer when it is fed; of a layer whose experts travel in parts, of its
body, and one of each part of the experts. Those are not compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from layerferry.engine.feed import Slot
from layerferry.layout import WEIGHT_PLANE, Plane
from layerferry.models.experts_in_parts import SomeExperts
from layerferry.models.skeleton import Skeleton
from layerferry.models.template import Template
from layerferry.units import Part, Piece


class Templates:
    """Makes templates when they are first needed. ``prepare`` sees each once, with the activation budget of its layer (the
    compiler's place). ``budgets`` and ``bodies``, what of a layer is in its slot, are in layer order."""

    def __init__(
        self, skeleton: Skeleton, prepare: Callable[[Template, float], None], budgets: Sequence[float], bodies: Sequence[Piece]
    ) -> None:
        self._skeleton, self._prepare, self._budgets, self._bodies = skeleton, prepare, budgets, bodies
        self._known: dict[tuple[Hashable, float, Slot], Template] = {}
        self._experts: dict[tuple[Hashable, int, Slot], SomeExperts] = {}
        self._training = True

    def train(self, training: bool) -> None:
        """Training or evaluation mode for every layer that is bound from now on."""
        self._training = training

    def bound(self, layer_index: int, slot: Slot) -> Template:
        """The template of layer ``layer_index`` over ``slot``, with that layer's number and buffers."""
        budget = self._budgets[layer_index]
        key = (self._skeleton.keys[layer_index], budget, slot)
        template = self._known.get(key)
        if template is None:
            body = self._bodies[layer_index]
            template = self._skeleton.template(layer_index, Plane(body.layout, WEIGHT_PLANE, slot.buffer))
            if body is body.unit:
                self._prepare(template, budget)
            else:
                template.tap_experts()
            self._known[key] = template
        if template.module.training != self._training:
            template.module.train(self._training)
        return template.bind(layer_index, self._skeleton.buffers[layer_index])

    def experts(self, layer_index: int, part: Part, slot: Slot) -> SomeExperts:
        """The experts of ``part`` of layer ``layer_index`` over ``slot``."""
        key = (self._skeleton.keys[layer_index], part.number, slot)
        experts = self._experts.get(key)
        if experts is None:
            experts = self._experts[key] = SomeExperts(self._skeleton.layers[layer_index], part, slot.buffer)
        if experts.module.training != self._training:
            experts.module.train(self._training)
        return experts
