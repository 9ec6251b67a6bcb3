"""The least budgets and the most layers with which something fits: asked of the search itself, by bisection.

What the plan that is least short lacks is a first guess and no more: with more of one place another plan may need less of it, and
with a disk or several places to share there is no closed form. Every question is ``can_fit``, which stops at the first plan.
Bytes are multiples of ``ROUNDED``. Checked by ``tests/planner/test_remedies.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from layerferry.layout import round_up
from layerferry.planner.facts import Model
from layerferry.planner.held import DEVICE, DISK, HOST
from layerferry.planner.machine import Machine
from layerferry.planner.problem import FRAGMENTATION, Problem
from layerferry.planner.search import can_fit

ROUNDED = 2**30 // 10
"""Budgets that are named are multiples of this many bytes."""
UNLIMITED = ROUNDED << 24
KEYS = {HOST: "host_memory", DEVICE: "device_memory", DISK: "disk_memory"}
"""What states the budget of a place."""


def least_budgets(question: Problem, needed: Mapping[str, int], wanted: Sequence[str]) -> dict[str, int] | None:
    """Place -> budget, for every place ``wanted``: the first the least that is enough while the others have no limit, the next
    the least beside it. None where no budget is enough. ``needed``: bytes of a plan that is short, to begin with."""
    machine, found = question.machine, dict[str, int]()
    for place in wanted:
        machine = having(machine, place, UNLIMITED)
    if not can_fit(replace(question, machine=machine)):
        return None
    for place in wanted:
        others = machine

        def fits(number: int, place: str = place, others: Machine = others) -> bool:
            return can_fit(replace(question, machine=having(others, place, number * ROUNDED)))

        guess = needed.get(place, 0) / (1 - FRAGMENTATION if place == DEVICE else 1)
        low = max(_there(question.machine, place) // ROUNDED, 0)
        found[place] = ROUNDED * _least(fits, low, round_up(math.ceil(guess), ROUNDED) // ROUNDED)
        machine = having(machine, place, found[place])
    return found


def having(machine: Machine, place: str, num_bytes: int) -> Machine:
    """``machine`` with a budget of ``num_bytes`` for ``place``, as the user would state it."""
    if place == DISK:
        return replace(machine, disk_available=num_bytes)
    if place == DEVICE:
        return replace(machine, device_available=num_bytes, device_source=KEYS[DEVICE])
    device = num_bytes if machine.shares_budget else machine.device_available
    return replace(machine, host_available=num_bytes, host_source=KEYS[HOST], device_available=device)


def _there(machine: Machine, place: str) -> int:
    return {HOST: machine.host_available, DEVICE: machine.device_available, DISK: machine.disk_available}[place]


def _least(fits: Callable[[int], bool], low: int, guess: int) -> int:
    """The least number that fits, where some does: ``low`` itself, or by bisection above it. The guess is mostly right."""
    if fits(low):
        return low
    high = max(guess, low + 1)
    while not fits(high):
        low, high = high, 2 * high
    if high == guess and high - low > 1 and not fits(high - 1):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def most_layers(question: Problem) -> tuple[int, int] | None:
    """(layers, parameters) of the largest model of the same layers that fits, with every kind of them; None where none does."""
    model = question.model
    fewest = model.num_layers - min(_last(model.behaviours, number) for number in set(model.behaviours))
    low, high = fewest - 1, model.num_layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if can_fit(replace(question, model=_of_layers(model, middle))) else (low, middle)
    return (low, _of_layers(model, low).num_params) if low >= fewest else None


def _last(behaviours: Sequence[int], number: int) -> int:
    return max(index for index, own in enumerate(behaviours) if own == number)


def _of_layers(model: Model, count: int) -> Model:
    """``model`` with its last ``count`` layers alone, for its bytes: FLOPs and seconds stay those of the whole."""
    ends = [unit for unit in model.units if not unit.is_layer]
    units = [ends[0], *model.layer_units[-count:], *ends[1:]]
    return replace(
        model,
        units=tuple(replace(unit, index=index) for index, unit in enumerate(units)),
        behaviours=model.behaviours[-count:],
        num_below=max(model.num_below - (model.num_layers - count), 0),
    )
