"""What outlives a step, by place and to the byte: planes @host, @device and @disk, and buffers that stand in for some of them.

Exactly what the store, its disk tier and ``engine/arrivals.py`` allocate. Checked by ``tests/planner/test_memory.py`` and
``test_disk.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from layerferry.engine.sizes import arrival_sizes
from layerferry.layout import FP32_PLANE, GRAD, RESIDUE, WEIGHT, PlaneSpec
from layerferry.plan import Item, Plan
from layerferry.planner.facts import Model
from layerferry.store.disk import RING, file_bytes, ring_bytes
from layerferry.store.store import TRAVELLING, state_bytes
from layerferry.units import Unit

HOST, DEVICE, DISK = "@host", "@device", "@disk"
_NAMES = {
    WEIGHT: "weights (bf16: high half of the master)",
    RESIDUE: "residues (the rest of the master)",
    GRAD: "gradients",
}


def arrivals(model: Model, specs: Mapping[str, PlaneSpec], plan: Plan) -> tuple[Item, ...]:
    """Exactly what ``engine/arrivals.py`` allocates."""
    if not plan.on_arrival:
        return ()
    num_bytes = arrival_bytes(model, specs[GRAD], plan.on_device)
    return (Item(what="buffers that gradients arrive in", place=HOST, num_bytes=num_bytes),)


@lru_cache(maxsize=256)
def arrival_bytes(model: Model, grad: PlaneSpec, home: tuple[int, ...]) -> int:
    """Of all buffers, with the units ``home`` @device."""
    sizes = arrival_sizes(model.units, Plan(on_arrival=True, on_device=home), {GRAD: grad})
    return sum(count * num_bytes for count, num_bytes in sizes.values())


def planes(
    model: Model,
    specs: Mapping[str, PlaneSpec],
    home: frozenset[int],
    on_disk: frozenset[int] = frozenset(),
    *,
    keeps_gradients: bool = True,
) -> tuple[Item, ...]:
    """One line a plane kind @host, one for the units at home @device, two for state @disk: exactly what the store allocates."""
    table, device = [], 0
    for kind, spec in specs.items():
        by_unit = unit_bytes(model, spec)
        there = sum(by_unit[index] for index in (home if kind in TRAVELLING else home | on_disk))
        if kind != GRAD or keeps_gradients:
            table.append(Item(what=_NAMES.get(kind, kind), place=HOST, num_bytes=sum(by_unit) - there))
        at_home = unit_bytes(model, FP32_PLANE if kind == GRAD else spec)  # gradients are summed where they are read
        device += sum(at_home[index] for index in home)
    if home:
        table.append(Item(what=f"all planes of {len(home)} of {len(model.units)} units", place=DEVICE, num_bytes=device))
    if on_disk:
        sizes = [disk_bytes(model.units[index], specs) for index in on_disk]
        table.append(Item(what=f"{RING} buffers for units @disk", place=HOST, num_bytes=ring_bytes(sizes)))
        table.append(Item(what=f"residues and moments of {len(on_disk)} units", place=DISK, num_bytes=sum(sizes)))
    return tuple(table)


def disk_bytes(unit: Unit, specs: Mapping[str, PlaneSpec]) -> int:
    """Of the state of ``unit`` @disk, and in a buffer of the ring; 0 where it has none."""
    return file_bytes(state_bytes(unit, specs))


def disk_order(units: Sequence[Unit], specs: Mapping[str, PlaneSpec]) -> tuple[int, ...]:
    """Indexes of the units with state, in the order in which they go to the disk. Layers go from the last on, whose updates have
    the longest time, and the ends last of all: their size would be that of every buffer of the ring."""
    layers, ends = ([unit for unit in reversed(units) if unit.is_layer is kind] for kind in (True, False))
    return tuple(unit.index for unit in (*layers, *ends) if state_bytes(unit, specs))


@lru_cache(maxsize=64)
def unit_bytes(model: Model, spec: PlaneSpec) -> tuple[int, ...]:
    """Bytes of one plane of every unit: asked for thousands of times in a search."""
    return tuple(unit.layout.bytes(spec) for unit in model.units)
