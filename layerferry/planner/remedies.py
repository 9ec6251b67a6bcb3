"""What is missing, and what would help, each remedy tried before it is named.

PlanError: needs 212.4 GiB @host, 192.0 free: 20.4 short. a model of 14.7B parameters fits, 46 of these 48 layers; ...

Numbers are those of the decision itself, with every place that may be used: the search is asked again with other settings, other
budgets, fewer layers (``enough.py``). Where no setting helps, budgets do: one alone, or all that are short together. Checked by
``tests/planner/test_remedies.py`` and ``test_choose.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from layerferry.config import OptimConfig, Pins
from layerferry.engine.sizes import device_sizes
from layerferry.layout import PlaneSpec, round_up
from layerferry.optim.choose import optimizer_for
from layerferry.plan import Plan, size_text, value_text
from layerferry.planner.enough import KEYS, ROUNDED, least_budgets, most_layers
from layerferry.planner.held import DEVICE, DISK, HOST, disk_bytes
from layerferry.planner.host import ADDRESS_SPACE, LIFT
from layerferry.planner.memory import plan_specs
from layerferry.planner.problem import FRAGMENTATION, Problem, budget_source, needs
from layerferry.planner.search import can_fit, search
from layerferry.units import Kind

SHORTEST_ROW = 128
_PINNABLE = [field.name for field in fields(Pins) if field.name != "optimizer_threads"]


def shortfall(question: Problem, plan: Plan) -> str:
    """One line: needed, there, short by place, and remedies with their numbers. ``plan`` is the one that is least short."""
    missing = []
    for place, (needed, there) in needs(plan, question.machine).items():
        if needed > there:
            holes = f", {FRAGMENTATION:.0%} left for holes" if place == DEVICE else ""
            kind = "free" if _reported(question, place) else f"allowed by {KEYS[place]}{holes}"
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
    yield from _unpinned(question)
    yield from _shorter_rows(question)
    if HOST in short:
        yield from _smaller_model(question)
    yield from _larger_budgets(question, {place: needed for place, (needed, _) in places.items()}, short)
    for place in sorted(short):
        if budget_source(question.machine, place) == ADDRESS_SPACE:
            yield LIFT
        elif _reported(question, place):
            another = f"{KEYS[place]}: states another limit than {budget_source(question.machine, place)}"
            yield "disk_folder: names a disk with more room" if place == DISK else another


def _fitting(question: Problem) -> Plan | None:
    """What would be chosen; None where nothing fits, which is known sooner."""
    return search(question)[0] if can_fit(question) else None


def _too_small_for_buffers(question: Problem, plan: Plan) -> Iterator[str]:
    sizes = device_sizes(question.model.units, plan, plan_specs(question.specs, plan))
    fixed, slot = sum(size.total for size in sizes.values()), sizes[Kind.LAYERS].slot_bytes
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
        plan = _fitting(replace(question, pins=replace(question.pins, **{name: None})))
        if plan is not None:
            yield f"{name}: {value_text(getattr(plan, name))} instead of {value_text(pinned)} fits ({_totals(question, plan)})"


def _larger_budgets(question: Problem, needed: Mapping[str, int], short: set[str]) -> Iterator[str]:
    """The least budget of one place that is enough; where none is alone, the least of all that are short."""
    alone = [(place,) for place in (HOST, DEVICE, DISK) if place in short and (place == HOST or len(short) == 1)]
    for wanted in (*alone, tuple(place for place in (DISK, DEVICE, HOST) if place in (*short, HOST, DEVICE))):
        budgets = least_budgets(question, needed, wanted)
        if budgets is not None:
            named = [_budget(question, place, num_bytes) for place, num_bytes in budgets.items()]
            yield " and ".join(named) + (" fit" if len(named) > 1 else _ENOUGH.get(wanted[0], " fits"))
            return


_ENOUGH = {DEVICE: f" is the least that is enough, to {size_text(ROUNDED)}"}


def _budget(question: Problem, place: str, num_bytes: int) -> str:
    """As a key where a key states it, else as what the machine must have."""
    there = {HOST: "host memory", DEVICE: "device memory", DISK: "the disk"}[place]
    return f"{size_text(num_bytes)} of {there}" if _reported(question, place) else f"{KEYS[place]}: {size_text(num_bytes)}"


def _shorter_rows(question: Problem) -> Iterator[str]:
    def of(tokens: int) -> Problem:
        return replace(question, shape=replace(question.shape, row_tokens=tokens), measured={})

    tokens = question.shape.row_tokens // 2
    if tokens >= SHORTEST_ROW and not can_fit(of(SHORTEST_ROW)):
        return
    while tokens >= SHORTEST_ROW:
        plan = _fitting(of(tokens))
        if plan is not None:
            yield f"cutoff_len: {tokens} fits ({_totals(question, plan)})"
            return
        tokens //= 2


def _fewer_bits(question: Problem) -> Iterator[str]:
    """The leaner format of the same optimizer, where that fits."""
    for name, lean in leaner_formats(question.specs):
        plan = _fitting(replace(question, specs=lean))
        if plan is not None:
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
    plan = _fitting(replace(question, on_arrival=True))
    if plan is not None:
        yield f"update_on_arrival: true with max_grad_norm: 0 fits ({_totals(question, plan)})"


def _on_disk(question: Problem) -> Iterator[str]:
    """The least disk memory that is enough for what the host has no room for."""
    state = sum(disk_bytes(unit, question.specs) for unit in question.model.units)
    if question.pins.disk_units is not None or question.machine.disk_available >= state:
        return
    plan = _fitting(replace(question, machine=replace(question.machine, disk_available=state)))
    if plan is not None:
        enough = round_up(plan.total(DISK), ROUNDED)
        yield f"disk_memory: {size_text(enough)} of a disk fits ({_totals(question, plan)})"


def _smaller_model(question: Problem) -> Iterator[str]:
    found = most_layers(question)
    if found is not None:
        (layers, params), model = found, question.model
        these = f"{layers} of these {model.num_layers} layers, and this one has {_count(model.num_params)}"
        yield f"a model of {_count(params)} parameters fits, {these}"


def _count(params: float) -> str:
    return f"{params / 1e9:.2f}B" if params >= 1e8 else f"{params / 1e6:.2f}M"


def _reported(question: Problem, place: str) -> bool:
    return budget_source(question.machine, place) != KEYS[place]


def _totals(question: Problem, plan: Plan) -> str:
    return ", ".join(f"{size_text(needed)} {place}" for place, (needed, _) in needs(plan, question.machine).items())
