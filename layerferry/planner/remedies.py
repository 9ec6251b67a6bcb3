"""What is missing, and what would help, each remedy tried before it is named.

PlanError: needs 212.4 GiB @host, 192.0 free: 20.4 short. at 14.0 B/param a model of 14.7B parameters fits; ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from layerferry.config import OptimConfig, Pins
from layerferry.engine.sizes import device_sizes
from layerferry.layout import PlaneSpec, round_up
from layerferry.optim.choose import optimizer_for
from layerferry.plan import Plan, size_text
from layerferry.planner.held import DEVICE, DISK, HOST, arrivals, disk_bytes, planes
from layerferry.planner.host import ADDRESS_SPACE, LIFT
from layerferry.planner.memory import plan_specs
from layerferry.planner.problem import FRAGMENTATION, Problem, budget_source, needs
from layerferry.planner.search import search

SHORTEST_ROW = 128
ROUNDED = 2**30 // 10
"""Budgets that are named are multiples of this many bytes."""
_PINNABLE = [field.name for field in fields(Pins) if field.name != "optimizer_threads"]


def shortfall(question: Problem, plan: Plan) -> str:
    """One line: needed, there, short by place, and remedies with their numbers. ``plan`` is the one that is least short."""
    missing = []
    for place, (needed, there) in needs(plan, question.machine).items():
        if needed > there:
            holes = f", {FRAGMENTATION:.0%} left for holes" if place == DEVICE else ""
            kind = "free" if _reported(question, place) else f"allowed by {_budget_key(place)}{holes}"
            missing.append(f"needs {size_text(needed)} {place}, {size_text(there)} {kind}: {size_text(needed - there)} short")
    remedies = "; ".join(_remedies(question, plan))
    return "; ".join(missing) + (f". {remedies}" if remedies else "")


def _remedies(question: Problem, plan: Plan) -> Iterator[str]:
    places = needs(plan, question.machine)
    short = {place for place, (needed, there) in places.items() if needed > there}
    if DEVICE in short:
        yield from _too_small_for_buffers(question, plan)
    if HOST in short:
        yield from _fewer_bits(question)
        yield from _on_arrival(question)
        yield from _on_disk(question)
    if _planes_fit(question, plan):
        yield from _unpinned(question)
        yield from _shorter_rows(question)
    if short == {DEVICE}:
        yield from _larger_device(question, places[DEVICE][0])
    if HOST in short:
        yield from _smaller_model(question, plan)
    if short == {HOST} and not _reported(question, HOST):
        yield from _larger_host(question, places[HOST][0])
    for place in sorted(short):
        if budget_source(question.machine, place) == ADDRESS_SPACE:
            yield LIFT
        elif _reported(question, place):
            another = f"{_budget_key(place)}: states another limit than {budget_source(question.machine, place)}"
            yield "disk_folder: names a disk with more room" if place == DISK else another


def _planes_fit(question: Problem, plan: Plan) -> bool:
    """Whether anything but another model or more host memory can help."""
    return _planes(question, plan) <= needs(plan, question.machine)[HOST][1]


def _planes(question: Problem, plan: Plan) -> int:
    """Bytes @host of everything that outlives a step."""
    home = frozenset(plan.on_device)
    specs, on_disk = plan_specs(question.specs, plan), frozenset(plan.on_disk)
    table = planes(question.model, specs, home, on_disk, keeps_gradients=not plan.on_arrival)
    table += arrivals(question.model, specs, plan)
    return sum(item.num_bytes for item in table if item.place == HOST)


def _too_small_for_buffers(question: Problem, plan: Plan) -> Iterator[str]:
    sizes = device_sizes(question.model.units, plan, plan_specs(question.specs, plan))
    fixed, slot = sizes[True].total + sizes[False].total, sizes[True].slot_bytes
    there = needs(plan, question.machine)[DEVICE][1]
    if there < slot:
        yield f"one layer's slot alone takes {size_text(slot)}"
    elif there < fixed:
        yield f"slots, slabs and accumulators ({plan.num_slots} layer slots, {plan.num_slabs} slabs) take {size_text(fixed)}"


def _unpinned(question: Problem) -> Iterator[str]:
    """Pinned fields that, left to the planner, would let the plan fit."""
    for name in _PINNABLE:
        pinned = getattr(question.pins, name)
        if pinned is None:
            continue
        plan, found = search(replace(question, pins=replace(question.pins, **{name: None})))
        if found:
            yield f"{name}: {_value(getattr(plan, name))} instead of {_value(pinned)} fits ({_totals(question, plan)})"


def _larger_device(question: Problem, needed: int) -> Iterator[str]:
    """The least device memory that is enough: what the plan that is least short needs."""
    enough = round_up(math.ceil(needed / (1 - FRAGMENTATION)), ROUNDED)
    machine = replace(question.machine, device_available=enough, device_source="device_memory")
    if search(replace(question, machine=machine))[1]:
        yield f"device_memory: {size_text(enough)} is the least that is enough"


def _larger_host(question: Problem, needed: int) -> Iterator[str]:
    """A ``host_memory`` that is enough: what the plan that is least short needs."""
    enough = round_up(needed, ROUNDED)
    there = enough if question.machine.is_cpu else question.machine.device_available  # there they are one memory
    machine = replace(question.machine, host_available=enough, device_available=there)
    if search(replace(question, machine=machine))[1]:
        yield f"host_memory: {size_text(enough)} fits"


def _shorter_rows(question: Problem) -> Iterator[str]:
    tokens = question.shape.row_tokens // 2
    while tokens >= SHORTEST_ROW:
        plan, found = search(replace(question, shape=replace(question.shape, row_tokens=tokens), measured={}))
        if found:
            yield f"cutoff_len: {tokens} fits ({_totals(question, plan)})"
            return
        tokens //= 2


def _fewer_bits(question: Problem) -> Iterator[str]:
    """The leaner format of the same optimizer, where that fits."""
    for name, lean in leaner_formats(question.specs):
        plan, found = search(replace(question, specs=lean))
        if found:
            yield f"optim: {name} fits ({_totals(question, plan)})"


def leaner_formats(specs: Mapping[str, PlaneSpec]) -> Iterator[tuple[str, dict[str, PlaneSpec]]]:
    """``optim`` of the same rule with moments of 8 bits, and its planes; none where ``specs`` has them."""
    for name in ("adamw_8bit", "muon_8bit"):
        lean = {**specs, **optimizer_for(OptimConfig(optim=name)).state_planes}
        if lean.keys() == specs.keys() and _num_coded(lean) > _num_coded(specs):
            yield name, lean


def _num_coded(specs: Mapping[str, PlaneSpec]) -> int:
    return sum(spec.coded for spec in specs.values())


def _on_arrival(question: Problem) -> Iterator[str]:
    """No gradients kept, where that fits."""
    if question.on_arrival:
        return
    plan, found = search(replace(question, on_arrival=True))
    if found:
        yield f"update_on_arrival: true with max_grad_norm: 0 fits ({_totals(question, plan)})"


def _on_disk(question: Problem) -> Iterator[str]:
    """The least disk memory that is enough for what the host has no room for."""
    state = sum(disk_bytes(unit, question.specs) for unit in question.model.units)
    if question.pins.disk_units is not None or question.machine.disk_available >= state:
        return
    plan, found = search(replace(question, machine=replace(question.machine, disk_available=state)))
    if found:
        enough = round_up(plan.total(DISK), ROUNDED)
        yield f"disk_memory: {size_text(enough)} of a disk fits ({_totals(question, plan)})"


def _smaller_model(question: Problem, plan: Plan) -> Iterator[str]:
    needed, there = needs(plan, question.machine)[HOST]
    per_param = _planes(question, replace(plan, on_device=(), on_disk=())) / question.model.num_params
    most = (there - (needed - _planes(question, plan))) / per_param
    if most > 0:
        size = question.model.num_params
        yield f"at {per_param:.1f} B/param a model of {_count(most)} parameters fits, this one has {_count(size)}"


def _count(params: float) -> str:
    return f"{params / 1e9:.2f}B" if params >= 1e8 else f"{params / 1e6:.2f}M"


def _reported(question: Problem, place: str) -> bool:
    return budget_source(question.machine, place) != _budget_key(place)


def _budget_key(place: str) -> str:
    return {HOST: "host_memory", DEVICE: "device_memory", DISK: "disk_memory"}[place]


def _totals(question: Problem, plan: Plan) -> str:
    return ", ".join(f"{size_text(needed)} {place}" for place, (needed, _) in needs(plan, question.machine).items())


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
