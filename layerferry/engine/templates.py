"""One template per behaviour, budget and slot, bound to a layer when it is fed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from layerferry.engine.feed import Slot
from layerferry.layout import WEIGHT_PLANE, Plane
from layerferry.models.skeleton import Skeleton
from layerferry.models.template import Template


class Templates:
    """Makes templates when they are first needed. ``prepare`` sees each once, with the activation budget of its layer (the
    compiler's place). ``budgets``: in layer order."""

    def __init__(self, skeleton: Skeleton, prepare: Callable[[Template, float], None], budgets: Sequence[float]) -> None:
        self._skeleton, self._prepare, self._budgets = skeleton, prepare, budgets
        self._known: dict[tuple[Hashable, float, Slot], Template] = {}
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
            layout = self._skeleton.layer_units[layer_index].layout
            template = self._skeleton.template(layer_index, Plane(layout, WEIGHT_PLANE, slot.buffer))
            self._prepare(template, budget)
            self._known[key] = template
        if template.module.training != self._training:
            template.module.train(self._training)
        return template.bind(layer_index, self._skeleton.buffers[layer_index])
