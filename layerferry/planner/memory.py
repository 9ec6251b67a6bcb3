"""Bytes by place: planes, slots, slabs and accumulators exactly; activations from measurements (``calibrate.py``) or from an
estimate.

What is alive @device when a step is at its fullest, following ``engine/sweep.py`` (M micro-batches of t tokens a wave, L
layers, D hidden):

- always: slots, slabs, accumulators (``engine/sizes.py``), buffers, the libraries' workspaces;
- for the wave: ids, masks, rotary tables and the first hidden states of all M micro-batches, because a pass keeps the
  prologue's graph;
- kept: every (layer, micro-batch) keeps its *output* and what autograd saved. A layer's input is the output of the one below
  (shared storage: it is counted there), so L layers and the prologue hold L + 1 hidden states. Saved weights are handles and
  cost nothing;
- forward: the peak is in a layer's last micro-batch, on top of what all before have kept: ``forward_peak`` minus that
  micro-batch's own ``kept``;
- head: everything is kept, gradients of the micro-batches before are there (D each), and one head's working set on top; of a
  head in parts, what all micro-batches keep from part to part takes the gradients' place, until they take its;
- backward: the first micro-batch of a layer is the fullest: everything below is kept, all M gradients are there, and on top
  come this layer's own transients, among them its parameters' gradients in one piece, before they are added to the
  accumulator;
- a head @device rounds its sum at the end of that phase, through a copy;
- layers whose inputs are @host (the first ones) keep nothing but router logits. Going up, the M micro-batches have one hidden
  state each, and those on their way down (``LEAVING``) are held beside them; the last such layer's outputs are the next one's
  inputs and stay, or are the head's and go with it. Going down, one micro-batch's whole graph is there with its transients,
  beside the landings. Where a layer's experts travel in parts, all M micro-batches hold besides what those are asked and answer;
- layers that turn with the head keep nothing for the others' phases. At the turn one micro-batch's graphs of them all are there
  beside what the others keep, head and loss on top; where no layer below keeps anything, gradients take the place of inputs;
- the prologue's backward and the drains' casts are smaller than any of these and are not counted.

The total is the largest of the phases; ``items`` lists what is alive in that phase. Exact means: a test holds it equal to
what is allocated. Left out: fragmentation and the device context (outside the allocator's count; ``choose.py`` leaves room),
and what the first, compiling step needs. Checked by ``tests/planner/test_memory.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from layerferry.engine.sizes import LEAVING, ROUNDED_AT_ONCE, DeviceSizes, device_sizes, input_sizes, micro_batches_of_wave
from layerferry.layout import FP32_PLANE, GRAD, PlaneSpec
from layerferry.plan import Item, Plan
from layerferry.planner.estimate import estimated
from layerferry.planner.facts import Model
from layerferry.planner.held import DEVICE, HOST, arrivals, planes
from layerferry.planner.updates import room_for_updates
from layerferry.planner.working import LayerBytes, Shape, Working, tokens_of
from layerferry.units import Kind


def plan_specs(specs: Mapping[str, PlaneSpec], plan: Plan) -> dict[str, PlaneSpec]:
    """``specs`` with the gradient plane that ``plan`` wants: four bytes where it is carried between waves exactly."""
    return {**specs, GRAD: FP32_PLANE} if plan.carry_fp32 else dict(specs)


def items(
    model: Model, specs: Mapping[str, PlaneSpec], plan: Plan, shape: Shape, working: Working | None = None
) -> tuple[Item, ...]:
    """The byte table of ``plan``; ``working`` None: estimated."""
    specs = plan_specs(specs, plan)
    working = working or estimated(model, plan, shape)
    home = frozenset(plan.on_device)
    return (
        *planes(model, specs, home, frozenset(plan.on_disk), keeps_gradients=not plan.on_arrival),
        *arrivals(model, specs, plan),
        *kept_inputs(model, plan, shape),
        *buffers(model, specs, plan),
        *activations(model, plan, shape, working),
    )


def kept_inputs(model: Model, plan: Plan, shape: Shape) -> tuple[Item, ...]:
    """Exactly what ``engine/kept.py`` allocates."""
    full = replace(plan, row_tokens=shape.row_tokens, rows_per_step=shape.rows_per_step)
    sizes = input_sizes(full, model.boundary, model.num_layers, model.num_below)
    if not sizes.num_layers:
        return ()
    return (
        Item(what=f"inputs of {sizes.num_layers} of {model.num_layers} layers", place=HOST, num_bytes=sizes.host_bytes),
        Item(what="landings of kept inputs", place=DEVICE, num_bytes=sizes.device_bytes),
    )


@lru_cache(maxsize=64)
def _sizes(model: Model, plan: Plan, specs: tuple[tuple[str, PlaneSpec], ...]) -> dict[Kind, DeviceSizes]:
    return device_sizes(model.units, plan, dict(specs))


def buffers(model: Model, specs: Mapping[str, PlaneSpec], plan: Plan) -> tuple[Item, ...]:
    bare = Plan(
        num_slots=plan.num_slots,
        num_slabs=plan.num_slabs,
        turn_layers=plan.turn_layers,
        host_inputs=plan.host_inputs if plan.turn_layers else 0,
        end_parts=plan.end_parts,
        expert_parts=plan.expert_parts,
        on_device=plan.on_device,
        num_waves=plan.num_waves,
        resident_gradients=plan.resident_gradients,
    )
    sizes = _sizes(model, bare, tuple(specs.items()))
    layers, ends, experts = (sizes[kind] for kind in (Kind.LAYERS, Kind.ENDS, Kind.EXPERTS))
    slots, own_slot, expert_slots = (size.num_slots * size.slot_bytes for size in (layers, ends, experts))
    num_slabs = layers.num_slabs + layers.num_landings
    return (
        Item(what=f"{layers.num_slots} layer slots", place=DEVICE, num_bytes=slots),
        Item(what=f"slot{'s' * (ends.num_slots > 1)} of embedding and head", place=DEVICE, num_bytes=own_slot),
        Item(what=f"{num_slabs} layer slabs", place=DEVICE, num_bytes=layers.in_slabs),
        Item(what="slabs of embedding and head", place=DEVICE, num_bytes=ends.in_slabs),
        *(
            [Item(what="slots and slabs of experts in parts", place=DEVICE, num_bytes=expert_slots + experts.in_slabs)]
            if experts.num_slots
            else []
        ),
        Item(what="gradient accumulators (fp32)", place=DEVICE, num_bytes=layers.sums + ends.sums + experts.sums),
        *(
            Item(what=what, place=DEVICE, num_bytes=num_bytes)
            for what, num_bytes in room_for_updates(model, tuple(specs.items()), plan.on_device)
        ),
    )


def activations(model: Model, plan: Plan, shape: Shape, working: Working) -> tuple[Item, ...]:
    lines = fullest(model, plan, shape, working, in_layers(model, plan, shape, working))
    return tuple(Item(what=what, place=DEVICE, num_bytes=num_bytes, exact=working.measured) for what, num_bytes in lines)


@dataclass(frozen=True, slots=True)
class InLayers:
    """What is alive @device in the layers' phases, whatever the head does."""

    kept: int
    """Of one micro-batch, in all layers."""
    computed_again: bool
    """Some layers' inputs are waited for, or computed from."""
    at_turn: int
    """Of one micro-batch, in the layers that turn with the head."""
    replaced: int
    """Hidden states that gradients have taken the place of at the turn, where no layer below keeps them."""
    phases: Mapping[str, Phase]


def in_layers(model: Model, plan: Plan, shape: Shape, working: Working) -> InLayers:
    total = micro_batches_of_wave(plan, shape.rows_per_step)
    hidden = total * tokens_of(plan, shape) * model.boundary
    layers, again = working.of_layers(model, plan), plan.num_rebuilt(model.num_layers)
    again = again if again > model.num_below else 0
    first_turning = plan.first_turning(model.num_layers, model.num_below)
    below, turning = layers[:first_turning], layers[first_turning:]
    stays = [_stays(model, plan, shape, working, index) for index in range(again)]
    kept, gradients = sum(stays) + sum(layer.kept for layer in below[again:]), hidden + total * working.router_gradients
    phases = _phases(below, stays, total, gradients, hidden)
    unkept = first_turning == max(again, model.num_below)  # what comes to the turn is no layer's of those that keep
    replaced = hidden - hidden // total if turning and unkept else 0
    if turning:
        phases["turn of the last layers"] = Phase(hidden if again and unkept else 0, gradients - replaced, _in_turn(turning))
    return InLayers(kept, again > 0, sum(layer.kept for layer in turning), replaced, phases)


def fullest(model: Model, plan: Plan, shape: Shape, working: Working, layers: InLayers) -> list[tuple[str, int]]:
    """(what, bytes @device) in the phase that needs most."""
    total = micro_batches_of_wave(plan, shape.rows_per_step)
    hidden = total * tokens_of(plan, shape) * model.boundary
    gradients = hidden + total * working.router_gradients
    away = hidden if layers.computed_again else 0  # the first hidden states are a layer's input, or leave
    first = total * working.prologue_kept - away
    between = total * (working.head_kept + working.router_gradients) if working.head_kept else gradients
    head = max(working.head_peak - between // total, _rounded_at_home(model, plan))  # its peak has a micro-batch's share in it
    phases = {**layers.phases, "head and loss": Phase(away, between - layers.replaced, layers.at_turn + head)}
    if shape.evaluates:
        alive = gradients + total * (working.prologue_kept + working.head_kept) + working.evaluation_peak
        phases["head of an evaluation"] = Phase(0, 0, alive - total * layers.kept - first)
    name = max(phases, key=lambda name: phases[name].total)
    phase = phases[name]
    return [
        ("buffers and library workspaces", model.buffer_bytes + working.workspaces),
        ("ids, masks and rotary tables" if layers.computed_again else "inputs and first hidden states", first),
        ("kept activations", total * layers.kept),
        *([("hidden states between layers", phase.hidden)] if phase.hidden else []),
        ("gradients of hidden states", phase.gradients),
        (f"working set: {name}", phase.rest),
    ]


def _stays(model: Model, plan: Plan, shape: Shape, working: Working, index: int) -> int:
    """What one micro-batch leaves @device in a layer that is computed again: router logits, its input where that stays, and
    what attention gave where that is kept; nothing below the backward."""
    if index < model.num_below:
        return 0
    logits = working.router_gradients // max(model.num_layers, 1)  # as large as their gradients
    own = 0 if index < plan.host_inputs else model.boundary
    attention = model.attention_bytes if index >= model.num_layers - plan.kept_attention else 0
    return logits + tokens_of(plan, shape) * (own + attention)


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes beside everything that is kept: of hidden states on their way, of their gradients, and the rest."""

    hidden: int
    gradients: int
    rest: int

    @property
    def total(self) -> int:
        return self.hidden + self.gradients + self.rest


def _rounded_at_home(model: Model, plan: Plan) -> int:
    """Of the head's gradient once more in the weights' dtype, while a head @device rounds its sum (engine/drain.py)."""
    head = model.units[-1]
    rounds = head.index in plan.on_device and not model.tied and not plan.carry_fp32
    return min(head.num_trained, ROUNDED_AT_ONCE) * model.compute_bytes if rounds else 0


def _phases(layers: list[LayerBytes], again: list[int], total: int, gradients: int, hidden: int) -> dict[str, Phase]:
    """Relative to everything kept; ``again``: what stays of each of the first layers, which are computed again."""
    first, others = layers[: len(again)], layers[len(again) :]
    everything = total * (sum(again) + sum(layer.kept for layer in others))
    waiting = hidden if again else 0
    below, forward, rebuilt = 0, 0, -everything
    for stays, layer in zip(again, first, strict=True):
        below += total * stays
        forward = max(forward, below + total * layer.waiting_up + layer.forward_peak - everything)
        graph = max(layer.forward_peak, layer.kept + layer.backward_peak)
        rebuilt = max(rebuilt, below + total * layer.waiting_down + graph - everything)
    backward = -everything
    for layer in others:
        kept = layer.kept
        forward = max(forward, below + (total - 1) * kept + layer.forward_peak - everything)
        below += total * kept
        backward = max(backward, below + layer.backward_peak - everything)
    return {
        "forward of a layer": Phase(waiting + LEAVING * waiting // total, 0, forward),
        "backward of a layer": Phase(waiting, gradients, backward),
        "backward of a layer, computed again": Phase(0, gradients, rebuilt),
    }


def _in_turn(layers: Sequence[LayerBytes]) -> int:
    """The most that one micro-batch needs on its way up and down."""
    below, most = 0, 0
    for layer in layers:
        most = max(most, below + layer.forward_peak)
        below += layer.kept
        most = max(most, below + layer.backward_peak)
    return most
