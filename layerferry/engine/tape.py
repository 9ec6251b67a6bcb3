"""The tape of small graphs: what the forward leaves behind is graphs and handles, never weights.

Each (unit, micro-batch) keeps its own autograd graph. While it is recorded, a saved-tensor hook replaces every tensor that
lives in the slot by a ``Handle`` (unit, dtype, offset, size, stride); the backward resolves handles against whichever slot
holds the unit by then. So a streamed layer needs no second forward. What else a graph keeps is the choice of ``apply``:
everything, or little more than the inputs (``torch.utils.checkpoint`` under the same hook, whose recomputation runs with
the template of the slot that the *backward* was given). A layer whose input travels to the host (``kept.py``) leaves no graph
at all (``pass_on``); its graph is made again, with the same numbers, right before its backward (``run_again``). A layer below
everything that is trained never has one (``pass_below``).

The hooks switch autograd's version check off, so nothing else notices an overwritten kept tensor: conformance runs with NaN
on release and the backward in another slot than the forward. Gradients are asked for with ``torch.autograd.grad`` and added
to the fp32 accumulator here.

Two guards: no saved tensor may live in a slot other than the recording one, and every leaf under a unit's output must be
its input, a side input, or its own parameter (a tensor from elsewhere, such as a shared key-value state, would make
gradients silently wrong: the model is refused).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from layerferry.engine.feed import Slot
from layerferry.engine.gradients import add_gradients, gradients_of
from layerferry.errors import ModelRefused
from layerferry.layout import Plane
from layerferry.models.graph import graph_leaves
from layerferry.models.stack import LayerCall
from layerferry.models.template import Template
from layerferry.plan import Plan
from layerferry.units import Piece, Unit


@dataclass(frozen=True, slots=True)
class Handle:
    """A saved tensor that lived in a slot: where it lies inside its unit's weights, whichever slot holds them."""

    unit: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True)
class Apply:
    """A layer call that can be repeated: in a rebuild the template is that of the backward's slot."""

    template: Template
    call: LayerCall

    def __call__(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Hidden states [B, T, D], then the router logits of a layer that is watched for them."""
        output = self.template(hidden, args, kwargs, self.call)
        return (output, *self.template.routed)


@dataclass(slots=True)
class Graph:
    """What one (unit, micro-batch) left behind."""

    hidden: Tensor  # leaf [B, T, D] @device
    outputs: tuple[Tensor, ...]  # hidden states [B, T, D] @device and router logits, holding the graph
    sides: list[tuple[Tensor, Tensor]]  # (the prologue's tensor, its leaf here)
    parameters: Sequence[Tensor]  # in layout order, the leaves that the graph knows
    apply: Apply


@dataclass(slots=True)
class SideGradients:
    """Gradients of side inputs, summed over the layers: what the prologue's backward needs besides that of the hidden
    states."""

    sums: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        known = self.sums.get(id(tensor))
        self.sums[id(tensor)] = (tensor, gradient if known is None else known[1] + gradient)


def rebuilt(layers: Sequence[Unit], plan: Plan) -> frozenset[int]:
    """Indexes of the units that ``plan`` wants computed again: the compiler's own recomputation takes their place."""
    budgets = zip(layers, plan.layer_budgets(len(layers)), strict=True)
    return frozenset(unit.index for unit, budget in budgets if budget < 1.0 and not plan.compile)


class Tape:
    """Records one wave. ``rebuilt``: indexes of units of which inputs are kept only; they are computed again in the backward.
    ``lowest``: of the layer with which the backward ends, because nothing below is trained."""

    def __init__(self, slots: Sequence[Slot], *, rebuilt: Collection[int], audit: bool, lowest: int | None = None) -> None:
        self._rebuilt = rebuilt
        self._audit, self._lowest = audit, lowest
        self._home = {slot.buffer.untyped_storage().data_ptr(): slot for slot in slots}
        self._bound: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._passed_on: dict[tuple[int, int], list[Tensor]] = {}  # router logits of layers without graph
        self.num_handles: dict[int, int] = {}

    @contextmanager
    def record(self, unit: Unit, slot: Slot) -> Iterator[None]:
        """Autograd inside keeps handles instead of tensors of ``slot``."""
        own = slot.buffer.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Tensor | Handle:
            storage = tensor.untyped_storage().data_ptr()
            if storage != own:
                assert storage not in self._home or not tensor.numel(), "a saved tensor lives in another unit's slot"
                # TRAP: a node that saves its own output would own itself, and a dropped graph stay (tests/engine/test_tape.py)
                return tensor.detach()
            self.num_handles[unit.index] = self.num_handles.get(unit.index, 0) + 1
            return Handle(unit.index, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

        with torch.autograd.graph.saved_tensors_hooks(pack, self._resolve):
            yield

    def _resolve(self, packed: Tensor | Handle) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        buffer = self._bound[packed.unit].view(packed.dtype)
        return torch.as_strided(buffer, packed.size, packed.stride, packed.offset)

    @contextmanager
    def resolving(self, unit: Unit, slot: Slot) -> Iterator[None]:
        """Inside, handles of ``unit`` mean the contents of ``slot``."""
        self._bound[unit.index] = slot.buffer
        try:
            yield
        finally:
            del self._bound[unit.index]

    def forward(self, unit: Unit, micro_batch: int, template: Template, hidden: Tensor, call: LayerCall) -> Tensor:
        """Run one layer on one micro-batch, inside ``record``; returns its hidden states [B, T, D] without graph."""
        graph = self._graph(unit, template, hidden, call, checkpointed=unit.index in self._rebuilt)
        self._graphs[unit.index, micro_batch] = graph
        return graph.outputs[0].detach()

    def pass_on(self, unit: Unit, micro_batch: int, template: Template, hidden: Tensor, call: LayerCall) -> Tensor:
        """``forward`` of a layer that ``run_again`` will run again: the same numbers, and nothing stays but router logits, and
        what ``Template.recording`` takes."""
        graph = self._graph(unit, template, hidden, call, checkpointed=False)
        self._passed_on[unit.index, micro_batch] = [logits.detach() for logits in graph.outputs[1:]]
        template.routed.clear()  # they hold the graph
        return graph.outputs[0].detach()

    def pass_below(self, unit: Unit, micro_batch: int, template: Template, hidden: Tensor, call: LayerCall) -> Tensor:
        """Run one layer that no backward comes to: hidden states [B, T, D], and nothing stays but router logits."""
        with torch.no_grad():
            output = template(hidden, call.args, call.kwargs, call)
        self._passed_on[unit.index, micro_batch] = list(template.routed)
        return output

    def run_again(self, unit: Unit, micro_batch: int, template: Template, hidden: Tensor, call: LayerCall) -> None:
        """The graph of a layer that was passed on, for the backward that follows at once."""
        self._graphs[unit.index, micro_batch] = self._graph(unit, template, hidden, call, checkpointed=False)

    def rehearse(self, unit: Unit, template: Template, hidden: Tensor, call: LayerCall) -> None:
        """The run of a layer of which nothing stays."""
        self._graph(unit, template, hidden, call, checkpointed=False)
        template.routed.clear()  # they hold the graph

    def slope(
        self, unit: Unit, template: Template, hidden: Tensor, call: LayerCall, leaf: Tensor, gradients: Sequence[Tensor]
    ) -> Tensor:
        """dL/d(leaf), of which the layer, run for this alone, makes something besides its input. ``gradients``: as in
        ``backward``."""
        graph = self._graph(unit, template, hidden, call, checkpointed=False, further=(leaf,))
        template.routed.clear()  # they hold the graph
        (found,) = _live_gradients(graph, [leaf], gradients)
        assert found is not None, "a layer that does nothing with what its experts give"
        return found

    def _graph(
        self,
        unit: Unit,
        template: Template,
        hidden: Tensor,
        call: LayerCall,
        *,
        checkpointed: bool,
        further: Sequence[Tensor] = (),
    ) -> Graph:
        leaf = hidden.detach().requires_grad_(unit.index != self._lowest)
        sides: list[tuple[Tensor, Tensor]] = []
        args = _as_leaves(call.args, sides)
        kwargs = _as_leaves(call.kwargs, sides)
        apply = Apply(template, call)
        run = functools.partial(checkpoint, apply, use_reentrant=False) if checkpointed else apply
        outputs: tuple[Tensor, ...] = run(leaf, args, kwargs)
        if self._audit:
            _audit(unit, outputs, [leaf, *(own for _, own in sides), *template.parameters, *further])
        return Graph(leaf, outputs, sides, template.parameters, apply)

    def routed(self, unit: Unit, micro_batch: int) -> list[Tensor]:
        """Router logits that a layer gave besides its hidden states, without graph; once, where it was passed on."""
        passed_on = self._passed_on.pop((unit.index, micro_batch), None)
        if passed_on is not None:
            return passed_on
        return [logits.detach() for logits in self._graphs[unit.index, micro_batch].outputs[1:]]

    def backward(
        self,
        unit: Unit,
        micro_batch: int,
        template: Template,
        gradients: Sequence[Tensor],
        accumulator: Plane,
        sides: SideGradients,
    ) -> Tensor | None:
        """Inside ``resolving``: adds this micro-batch's parameter gradients to ``accumulator``; returns dL/d(input) [B, T, D], or
        None where nothing below is trained.

        ``gradients``: dL/d(output) [B, T, D], then those of the router logits where a loss reads them.
        """
        graph = self._graphs.pop((unit.index, micro_batch))
        graph.apply.template = template
        wanted = [graph.hidden, *(own for _, own in graph.sides), *graph.parameters]
        found = _live_gradients(graph, wanted, gradients)
        num_sides = len(graph.sides)
        for (origin, _), side in zip(graph.sides, found[1 : 1 + num_sides], strict=True):
            if side is not None:
                sides.add(origin, side)
        self.add(unit, micro_batch, found[1 + num_sides :], accumulator)
        assert found[0] is not None or not graph.hidden.requires_grad, "a layer without a path from its output to its input"
        return found[0]

    def add(self, piece: Piece, micro_batch: int, gradients: Sequence[Tensor | None], accumulator: Plane) -> None:
        """What one micro-batch gives to the sum of ``piece``, in layout order."""
        add_gradients(accumulator, gradients)


def _live_gradients(graph: Graph, wanted: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """Router logits of a layer that trains nothing before its router have no graph."""
    live = [(output, own) for output, own in zip(graph.outputs, gradients, strict=False) if output.requires_grad]
    return gradients_of([output for output, _ in live], wanted, [own for _, own in live])


def _as_leaves(value: Any, sides: list[tuple[Tensor, Tensor]]) -> Any:
    """``value`` with every tensor detached; those that require grad become leaves and are listed."""
    if isinstance(value, Tensor):
        leaf = value.detach()
        if value.requires_grad:
            leaf.requires_grad_(True)
            sides.append((value, leaf))
        return leaf
    if isinstance(value, dict):
        return {key: _as_leaves(item, sides) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_as_leaves(item, sides) for item in value)
    return value


def _audit(unit: Unit, outputs: Sequence[Tensor], allowed: Sequence[Tensor]) -> None:
    known = {id(tensor) for tensor in allowed}
    for leaf in graph_leaves(list(outputs)):
        if id(leaf) not in known:
            raise ModelRefused(
                f"{unit.name}: its output depends on a tensor of shape {tuple(leaf.shape)} that is neither its input nor its "
                "parameter (state shared between layers, such as shared key-value heads): it cannot be streamed"
            )
