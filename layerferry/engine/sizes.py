"""Bytes of slots, slabs and accumulators: what the engine allocates, and what the planner counts. One function for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerferry.layout import FP32_PLANE, GRAD, WEIGHT, PlaneSpec
from layerferry.plan import Plan
from layerferry.units import Piece, Unit, divide

PART_BUFFERS = 2
"""Slots, slabs and landings of each kind where the ends travel in parts: one is used while the next is under way."""


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """One kind of unit: the layers, or the ends."""

    slot_bytes: int
    slab_bytes: int
    accumulator_bytes: int
    """Of the shared accumulator; with resident gradients, of all of them together."""
    num_slots: int
    num_slabs: int
    num_landings: int
    """Slabs that carried gradients come back to."""

    @property
    def total(self) -> int:
        return self.num_slots * self.slot_bytes + (self.num_slabs + self.num_landings) * self.slab_bytes + self.accumulator_bytes


def pieces_of(unit: Unit, plan: Plan) -> tuple[Piece, ...]:
    """What of ``unit`` travels at a time: all of it, or the parts of an end."""
    whole = unit.is_layer or unit.index in plan.on_device
    return (unit,) if whole else divide(unit, plan.end_parts)


def device_sizes(units: Sequence[Unit], plan: Plan, specs: Mapping[str, PlaneSpec]) -> dict[bool, DeviceSizes]:
    """Sizes by ``unit.is_layer``."""
    sizes = {}
    home = set(plan.on_device)
    carried = plan.num_waves > 1 and not plan.resident_gradients
    for kind in (True, False):
        of_kind = [unit for unit in units if unit.is_layer is kind and unit.index not in home]
        pieces = [pieces_of(unit, plan) for unit in of_kind]
        travelling = [piece.layout for own in pieces for piece in own]
        of_ends = PART_BUFFERS if any(len(own) > 1 for own in pieces) else 1
        sizes[kind] = DeviceSizes(
            slot_bytes=max((layout.bytes(specs[WEIGHT]) for layout in travelling), default=0),
            slab_bytes=max((layout.bytes(specs[GRAD]) for layout in travelling), default=0),
            accumulator_bytes=(sum if plan.resident_gradients else max)(
                [0, *(layout.bytes(FP32_PLANE) for layout in travelling)]
            ),
            num_slots=(plan.num_slots if kind else of_ends) if travelling else 0,
            num_slabs=(plan.num_slabs if kind else of_ends) if travelling else 0,
            num_landings=(2 if kind else of_ends) if carried and travelling else 0,
        )
    return sizes
