"""What a refusal says is true: whatever it names fits, what is said to be the least is, and something is always named."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from layerferry.config import OptimConfig
from layerferry.errors import PlanError
from layerferry.optim.choose import optimizer_for
from layerferry.planner.books import Books
from layerferry.planner.candidates import choices
from layerferry.planner.choose import decide
from layerferry.planner.enough import ROUNDED, having, least_budgets, most_layers
from layerferry.planner.held import DEVICE, DISK, HOST
from layerferry.planner.problem import Problem, fits, problem
from layerferry.planner.resorts import last_resorts, leanest
from layerferry.planner.search import can_fit, search
from layerferry.store.store import plane_specs
from tests.planner.subjects import GIB, config, machine, qwen

LONG = 131072


def ask(
    device_gib: float,
    host_gib: float,
    *,
    rows: int = 1,
    tokens: int = 1024,
    optim: str = "adamw_torch",
    disk_gib: float = 0,
    name: str = "qwen2.5-7b",
    there: dict[str, Any] | None = None,
    **pins: Any,
) -> Problem:
    disk = int(disk_gib * GIB)
    found = machine(device_gib=device_gib, host_gib=host_gib, disk_available=disk, **(there or {}))
    planes = plane_specs(optimizer_for(OptimConfig(optim=optim)).state_planes)
    return problem(qwen(name), planes, found, config(rows=rows, disk_memory=disk or None, **pins), tokens)


def refused(question: Problem) -> str:
    shortfall = decide(question).shortfall
    assert shortfall is not None
    return shortfall


def said(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


# ---------------------------------------------------------------- what fits is not refused


def test_ends_are_cut_where_nothing_else_fits_however_small_they_are() -> None:
    """Two rows of 128k tokens: whole ends are less than a tenth of the device, which lacks a GiB with them."""
    whole, unasked = (ask(43, 104, rows=2, tokens=LONG, end_parts=parts) for parts in (1, None))
    assert not search(whole)[1]
    plan, found = search(unasked)
    assert found and plan.end_parts > 1 and fits(unasked, plan)


def test_ends_are_cut_for_the_host_where_it_is_the_device_too() -> None:
    """On a CPU, what the device takes is taken of the host: the least that fits has the ends in parts."""
    question = ask(0, 60, there={"cpu": True, "host_available": 60 * 2**30})
    budgets = least_budgets(question, {}, (HOST,))
    assert budgets is not None
    least = replace(question, machine=having(question.machine, HOST, budgets[HOST]))
    plan, found = search(least)
    assert found and plan.end_parts > 1
    assert not search(replace(least, pins=replace(least.pins, end_parts=1)))[1]


@pytest.mark.parametrize(("tokens", "rows"), [(LONG, 2), (30000, 2), (1024, 8)])
@pytest.mark.parametrize("place", [HOST, DEVICE])
def test_what_can_fit_is_what_the_search_finds(tokens: int, rows: int, place: str) -> None:
    """At the least budget and one step below it. Oracle: every choice with every number of inputs @host and units at home."""
    given = {HOST: (20, 1), DEVICE: (1, 42)}[place]
    question = ask(*given, tokens=tokens, rows=rows, name="qwen2.5-3b", micro_batch_rows=1, chunk_tokens=256)
    budgets = least_budgets(question, {}, (place,))
    assert budgets is not None
    for num_bytes, expected in ((budgets[place], True), (budgets[place] - ROUNDED, False)):
        asked = replace(question, machine=having(question.machine, place, num_bytes))
        assert can_fit(asked) is search(asked)[1] is expected
    books, model = Books(asked), question.model
    every = [lean for one in (asked, *last_resorts(asked)) for lean in leanest(one)]
    plain = [one for lean in every for one in choices(lean) if not one.may_favour]
    assert plain and not any(
        books.short(books._with(one._replace(host_inputs=inputs), home)) == 0
        for one in plain
        for inputs in range(model.num_layers + 1)
        for home in range(len(model.units) + 1)
    )


def test_inputs_fill_what_the_host_has_left() -> None:
    """Room @host for some inputs and not for all, and @device for none: more of them there would send a unit home."""
    question = ask(3.8, 40.45, tokens=512, rows=8, name="qwen2.5-3b", micro_batch_rows=1)
    plan, found = search(question)
    assert found and 0 < plan.host_inputs < 36


# ---------------------------------------------------------------- budgets that are enough


@pytest.mark.parametrize(("device_gib", "host_gib", "rows", "tokens"), [(40, 104, 2, LONG), (2.0, 126, 1, 1024)])
def test_the_least_device_is_the_least(device_gib: float, host_gib: float, rows: int, tokens: int) -> None:
    question = ask(device_gib, host_gib, rows=rows, tokens=tokens)
    least = said(r"device_memory: ([\d.]+) GiB is the least that is enough", refused(question))
    assert search(ask(least + 0.005, host_gib, rows=rows, tokens=tokens))[1]
    assert not search(ask(least - 0.2, host_gib, rows=rows, tokens=tokens))[1]


PINS: dict[str, tuple[Any, ...]] = {
    "num_slots": (1, 2),
    "num_slabs": (1,),
    "end_parts": (1, 17, 64, 256),
    "expert_parts": (1, 4, 32, 128),
    "chunk_tokens": (16, 64, 256),
    "mlp_chunk_tokens": (0, 64, 512),
    "host_inputs": (0, 14, 28),
    "num_waves": (1, 3, 8),
    "activation_budget": (0.0, 0.3, 1.0),
    "resident_gradients": (False,),
    "carry_fp32": (False,),
    "micro_batch_rows": (1,),
    "device_units": (0,),
    "kept_attention": (0,),
    "richer_layers": (0,),
    "turn_layers": (0,),
}


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-30b-a3b"])
def test_no_pins_make_fit_what_is_less_than_the_least(name: str, cpu: bool) -> None:
    """Drawn at random; the least is found without any. A CPU has a budget of its own for what a device would hold."""
    there, rng = {"cpu": cpu, "device_source": "device_memory", "device_available": GIB}, random.Random(0)
    question = ask(1, 4000, rows=8, tokens=2048, name=name, there=there)
    budgets = least_budgets(question, {}, (DEVICE,))
    assert budgets is not None and can_fit(replace(question, machine=having(question.machine, DEVICE, budgets[DEVICE])))
    less = replace(question, machine=having(question.machine, DEVICE, budgets[DEVICE] - ROUNDED))
    asked = 0
    while asked < 40:
        pins = {key: rng.choice(values) for key, values in PINS.items() if rng.random() < 0.35}
        if "moe" not in question.model.name:
            pins.pop("expert_parts", None)
        try:
            one = replace(ask(1, 4000, rows=8, tokens=2048, name=name, there=there, **pins), machine=less.machine)
        except PlanError:
            continue  # pins that contradict each other
        asked += 1
        assert not can_fit(one), pins
    assert search(replace(question, machine=having(question.machine, DEVICE, budgets[DEVICE])))[1]


@pytest.mark.parametrize("on_arrival", [False, True])
def test_the_least_host_counts_the_disk_that_is_allowed(on_arrival: bool) -> None:
    def asked(host_gib: float) -> Problem:
        return ask(10, host_gib, optim="adamw_8bit", disk_gib=500, update_on_arrival=on_arrival)

    text = refused(asked(16))
    least = said(r"host_memory: ([\d.]+) GiB fits", text)
    assert least < 35, "46 GiB without the disk"
    assert decide(asked(least + 0.05)).shortfall is None
    assert decide(asked(least - 0.2)).shortfall is not None
    assert said(r"needs ([\d.]+) GiB @host", text) < 35, "with all that may go to the disk there"


def test_a_smaller_model_is_one_that_fits_with_the_disk() -> None:
    question = ask(10, 40, disk_gib=500)
    layers = int(said(r"fits, (\d+) of these 28 layers, and this one has 7\.62B", refused(question)))
    found = most_layers(question)
    assert found is not None and found[0] == layers
    for count, expected in ((layers, True), (layers + 1, False)):
        assert search(replace(question, model=qwen("qwen2.5-7b", count)))[1] is expected
    assert found[1] == qwen("qwen2.5-7b", layers).num_params


def test_where_there_is_one_memory_what_is_needed_is_what_is_named() -> None:
    """Large tied ends at home need no buffers: the plan that is least short has them there."""
    there = {"cpu": True, "host_available": GIB}
    text = refused(ask(0, 1, rows=8, tokens=128, name="qwen2.5-3b", there=there))
    needed, named = said(r"needs ([\d.]+) GiB @host", text), said(r"host_memory: ([\d.]+) GiB fits", text)
    assert needed <= named < needed + 0.2
    (home,) = least_budgets(ask(0, 1, rows=8, tokens=128, name="qwen2.5-3b", there=there, device_units=0), {}, (HOST,)).values()  # type: ignore[union-attr]
    assert named * GIB < home - GIB


def test_no_model_is_named_where_none_fits() -> None:
    text = refused(ask(10, 4))
    assert "a model of" not in text and "host_memory: " in text


@pytest.mark.parametrize(("device_gib", "host_gib", "rows", "tokens"), [(10, 16, 1, 65536), (2, 32, 2, 262144)])
def test_where_both_are_short_a_pair_is_named(device_gib: float, host_gib: float, rows: int, tokens: int) -> None:
    text = refused(ask(device_gib, host_gib, rows=rows, tokens=tokens))
    pair = re.search(r"device_memory: ([\d.]+) GiB and host_memory: ([\d.]+) GiB fit", text)
    assert pair is not None, text
    device, host = map(float, pair.groups())
    assert search(ask(device + 0.05, host + 0.05, rows=rows, tokens=tokens))[1]
    assert not search(ask(device - 0.2, 500, rows=rows, tokens=tokens))[1]
    assert not search(ask(device + 0.005, host - 0.2, rows=rows, tokens=tokens))[1]


def test_shorter_rows_help_a_host_too_that_is_short() -> None:
    """They leave the device room for units that the host has none for."""
    question = ask(60, 90, tokens=262144)
    text = refused(question)
    length = int(said(r"cutoff_len: (\d+) fits", text))
    assert "@host, 90.0 GiB allowed" in text and search(ask(60, 90, tokens=length))[1]
    assert not search(ask(60, 90, tokens=2 * length))[1]


def test_a_pin_that_is_in_the_hosts_way_is_named() -> None:
    assert re.search(r"device_units: \d+ instead of 0 fits", refused(ask(139, 60, device_units=0)))


def test_what_the_system_reports_is_not_a_key_to_be_raised() -> None:
    text = refused(ask(10, 60, there={"host_source": "MemAvailable"}))
    assert re.search(r"[\d.]+ GiB of host memory fits; host_memory: states another limit than MemAvailable", text)


def test_units_that_are_pinned_to_a_small_disk_name_the_disk_that_is_enough() -> None:
    def asked(disk_gib: float) -> Problem:
        return ask(139, 126, disk_gib=disk_gib, disk_units=10)

    text = refused(asked(1))
    assert "disk_units: 0 instead of 10 fits" in text
    least = said(r"disk_memory: ([\d.]+) GiB fits", text)
    assert search(asked(least + 0.05))[1] and not search(asked(least - 0.2))[1]
    full = decide(replace(asked(1), machine=replace(asked(1).machine, disk_source="free on the disk"))).shortfall
    assert full is not None and re.search(r"GiB of the disk fits; disk_folder: names a disk with more room", full)


def test_device_and_disk_that_are_short_are_named_together() -> None:
    budgets = least_budgets(ask(1, 126, disk_gib=1, disk_units=10), {}, (DISK, DEVICE, HOST))
    assert budgets is not None and list(budgets) == [DISK, DEVICE, HOST]
    assert re.search(r"disk_memory: .* and device_memory: .* fit$", refused(ask(1, 126, disk_gib=1, disk_units=10)))


# ---------------------------------------------------------------- notes of a plan that is refused


@pytest.mark.parametrize(("host_gib", "said"), [(60, False), (110, True)])
def test_who_is_refused_is_not_told_to_leave_the_budget_out(host_gib: float, said: bool) -> None:
    decision = decide(ask(10, host_gib, there={"host_free": 20 * 2**30}))
    assert (decision.shortfall is None) is said
    assert ("leave host_memory out" in " ".join(decision.plan.notes)) is said
