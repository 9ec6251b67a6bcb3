"""Bytes of slots, slabs, accumulators, kept inputs, and of what matrices are orthogonalised in: what the engine allocates, and
what the planner counts. One function for both."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from layerferry.errors import PlanError
from layerferry.layout import FP32_PLANE, GRAD, SECTION_DTYPES, WEIGHT, PlaneSpec, round_up
from layerferry.optim.orthogonal import orthogonalises, stacks_of
from layerferry.plan import Plan
from layerferry.units import Kind, Piece, Unit, divide

PART_BUFFERS = 2
"""Slots, slabs and landings of a kind that travels in parts: one is used while the next is under way."""

LAYER_LANDINGS = 2
"""Slabs that carried gradients of layers come back to: one is taken up while the next arrives."""

PADDING = 8
"""Rows are padded to a multiple of this many tokens."""
ARRIVALS = {True: 3, False: 1}
"""By ``unit.is_layer``: buffers @host that gradients arrive in where they are consumed on arrival. One layer's is read by the
optimizer while the next lands; the ends' gradients arrive at the two ends of the backward."""
ROUNDED_AT_ONCE = 1 << 26
"""Elements of a sum @device that are rounded in place at a time."""
LEAVING = 2
"""Inputs on their way to the host, at most: each is held @device until it is there."""
LANDINGS = 2
"""Device buffers that inputs come back into: one is used while the next arrives."""


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """Of one kind."""

    slot_bytes: int
    slab_bytes: int
    accumulator_bytes: int
    """Of the shared accumulator; with resident gradients, of all of them together."""
    turning_bytes: int
    """Of the accumulators that layers which turn have of their own."""
    num_slots: int
    num_slabs: int
    num_landings: int
    """Slabs that carried gradients come back to."""

    @property
    def total(self) -> int:
        return self.num_slots * self.slot_bytes + self.in_slabs + self.sums

    @property
    def in_slabs(self) -> int:
        return (self.num_slabs + self.num_landings) * self.slab_bytes

    @property
    def sums(self) -> int:
        return self.accumulator_bytes + self.turning_bytes


def pieces_of(unit: Unit, plan: Plan) -> tuple[Piece, ...]:
    """What of ``unit`` travels at a time: all of it, the parts of an end, or a layer's body and the parts of its experts."""
    if unit.index in plan.on_device:
        return (unit,)
    return divide(unit, plan.expert_parts if unit.is_layer else plan.end_parts)


def turning_layers(units: Sequence[Unit], plan: Plan, num_below: int = 0) -> list[Unit]:
    """Of all ``units`` of a model, the layers that turn with the head and do not live @device; the first ``num_below``, which
    the backward does not come to, do not."""
    layers = [unit for unit in units if unit.is_layer]
    return [unit for unit in layers[plan.first_turning(len(layers), num_below) :] if unit.index not in plan.on_device]


def turning_sums(units: Sequence[Unit], plan: Plan) -> list[Unit]:
    """Of these, the ones that have an accumulator of their own: what is trained, where sums do not stay @device anyway."""
    return [] if plan.resident_gradients else [unit for unit in turning_layers(units, plan) if unit.num_trained]


def refuse_turning(units: Sequence[Unit], plan: Plan, num_below: int) -> None:
    """Raise ``PlanError`` where layers cannot turn as ``plan`` has it."""
    turning = turning_layers(units, plan, num_below)
    travelling = [unit for unit in units if unit.is_layer and unit.index not in plan.on_device]
    needed = min(len(turning) + 1, len(travelling))
    if turning and plan.num_slots < needed:
        raise PlanError(
            f"num_slots: {plan.num_slots}: the {len(turning)} layers that turn hold one each, and others need one: set it to "
            f"{needed} or more, or turn_layers lower"
        )
    head = units[-1]
    if turning and len(pieces_of(head, plan)) > 1:
        raise PlanError(
            f"turn_layers: {plan.turn_layers}: layers turn with a head that is there whole: leave turn_layers out, or set "
            "end_parts: 1"
        )


def device_sizes(units: Sequence[Unit], plan: Plan, specs: Mapping[str, PlaneSpec]) -> dict[Kind, DeviceSizes]:
    """Sizes by kind."""
    sizes = {}
    own_sums = sum(unit.layout.bytes(FP32_PLANE) for unit in turning_sums(units, plan))
    carried = plan.num_waves > 1 and not plan.resident_gradients
    away = [piece for unit in units if unit.index not in plan.on_device for piece in pieces_of(unit, plan)]
    for kind in Kind:
        pieces = [piece for piece in away if piece.kind is kind]
        travelling = [piece.layout for piece in pieces]
        drained = any(layout.num_trained for layout in travelling)
        in_parts = PART_BUFFERS if any(piece is not piece.unit for piece in pieces) else 1
        slots, slabs, landings = (plan.num_slots, plan.num_slabs, LAYER_LANDINGS) if kind is Kind.LAYERS else (in_parts,) * 3
        sizes[kind] = DeviceSizes(
            slot_bytes=max((layout.bytes(specs[WEIGHT]) for layout in travelling), default=0),
            slab_bytes=max((layout.bytes(specs[GRAD]) for layout in travelling), default=0),
            accumulator_bytes=(sum if plan.resident_gradients else max)(
                [0, *(layout.bytes(FP32_PLANE) for layout in travelling)]
            ),
            turning_bytes=own_sums if kind is Kind.LAYERS else 0,
            num_slots=slots if travelling else 0,
            num_slabs=slabs if drained else 0,
            num_landings=landings if carried and drained else 0,
        )
    return sizes


def arrival_sizes(units: Sequence[Unit], plan: Plan, specs: Mapping[str, PlaneSpec]) -> dict[bool, tuple[int, int]]:
    """By ``unit.is_layer``: how many buffers @host gradients arrive in, and bytes of each; none where gradients have planes."""
    sizes = {}
    for kind, count in ARRIVALS.items():
        arriving = [unit for unit in units if unit.is_layer is kind and unit.num_trained and unit.index not in plan.on_device]
        largest = max((unit.layout.bytes(specs[GRAD]) for unit in arriving), default=0)
        sizes[kind] = (min(count, len(arriving)) if plan.on_arrival else 0, largest)
    return sizes


def orthogonal_bytes(units: Sequence[Unit], specs: Mapping[str, PlaneSpec], home: Container[int]) -> tuple[int, int]:
    """What orthogonalising matrices needs @device, of the largest one: (where values land that live @host, what it works in);
    zeros for an optimizer that does not."""
    landing = working = 0
    for unit in units if orthogonalises(specs) else ():
        spec = FP32_PLANE if unit.index in home else specs[GRAD]
        dtypes = dict(zip(SECTION_DTYPES, spec.dtypes, strict=True))
        for stack in stacks_of(unit.layout):
            dtype = dtypes[stack.entry.dtype]
            assert dtype is not None
            landing = max(landing, 0 if unit.index in home else stack.numel * dtype.itemsize)
            working = max(working, stack.workspace_bytes(dtype))
    return landing, working


@dataclass(frozen=True, slots=True)
class InputSizes:
    """Kept inputs @host: of ``num_layers`` layers from ``first_layer`` on, for every micro-batch of a wave."""

    num_layers: int
    num_micro_batches: int
    input_bytes: int
    first_layer: int
    """The first whose inputs are kept."""
    num_rebuilt: int
    """Layers up to here are computed again; the inputs of those behind ``num_layers`` stay @device."""
    first_attention: int
    """From this layer on, what attention gives is kept."""

    @property
    def host_bytes(self) -> int:
        return self.num_layers * self.num_micro_batches * self.input_bytes

    @property
    def device_bytes(self) -> int:
        return LANDINGS * self.input_bytes if self.num_layers else 0


def input_sizes(plan: Plan, boundary: int, num_layers: int, num_below: int = 0) -> InputSizes:
    """``boundary``: bytes of one token's hidden states. ``num_below``: layers that the backward does not come to; of the first
    ``plan.host_inputs`` their inputs are kept nowhere."""
    again = (num_below, plan.num_rebuilt(num_layers), num_layers - plan.kept_attention)
    at_host = min(plan.host_inputs, num_layers) - num_below
    if at_host <= 0:
        return InputSizes(0, 0, 0, *again)
    rows = min(plan.micro_batch_rows, plan.rows_per_step)
    tokens = rows * round_up(plan.row_tokens, PADDING)
    return InputSizes(at_host, micro_batches_of_wave(plan, plan.rows_per_step), tokens * boundary, *again)


def micro_batches_of_wave(plan: Plan, rows_per_step: int) -> int:
    """Micro-batches of the largest wave, as the engine cuts them."""
    return max(plan.wave_sizes(-(-rows_per_step // plan.micro_batch_rows)))
