"""Units @disk in the plan: their bytes are the store's, their seconds a closed form, and they come last of all means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from layerferry.errors import PlanError
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import Optimizer
from layerferry.optim.formats import StateFormat
from layerferry.optim.muon import Muon
from layerferry.optim.sgd import SGD
from layerferry.plan import Plan, Seconds
from layerferry.planner.candidates import choices
from layerferry.planner.choose import decide, with_notes
from layerferry.planner.disk_books import DiskBooks
from layerferry.planner.facts import Model
from layerferry.planner.held import DEVICE, DISK, HOST, planes
from layerferry.planner.machine import Machine
from layerferry.planner.problem import Problem, fits, problem
from layerferry.planner.program import Piece, Program
from layerferry.planner.rate import Rate
from layerferry.planner.report import render
from layerferry.planner.schedule import waits
from layerferry.planner.search import search
from layerferry.store.disk import RING, file_bytes
from layerferry.store.scratch import ScratchFile
from layerferry.store.store import Store, plane_specs, state_bytes
from tests.planner.subjects import GIB, books_beside_the_table, config, machine, qwen, skeleton, specs
from tests.planner.test_memory import CountingBackend


def ask(name: str = "qwen2.5-7b", rows: int = 4, disk_gib: float = 500, disk: float = 2e9, **there: float) -> Problem:
    pins = {key: there.pop(key) for key in ("disk_units", "micro_batch_rows") if key in there}
    rate = Rate(disk, "measured")
    found: Machine = replace(
        machine(**there), disk_available=int(disk_gib * GIB), disk_read_bytes_per_s=rate, disk_write_bytes_per_s=rate
    )
    return problem(qwen(name), specs(), found, config(rows=rows, disk_memory=int(disk_gib * GIB), **pins), 1024)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [AdamW(), AdamW(state_format=StateFormat(master="24bit", moments="8bit")), SGD(momentum=0.9), Muon()],
    ids=["adamw", "8 bits", "sgd", "muon"],
)
@pytest.mark.parametrize("on_disk", [(2,), (1, 2, 3), (0, 5)])
def test_bytes_are_those_of_the_store(tmp_path: Path, optimizer: Optimizer, fp32: bool, on_disk: tuple[int, ...]) -> None:
    built, backend, wanted = skeleton("qwen3_moe", fp32=fp32), CountingBackend(), plane_specs(optimizer.state_planes)
    table = planes(Model.of(built), wanted, frozenset({4}), frozenset(on_disk))
    planned = {place: sum(item.num_bytes for item in table if item.place == place) for place in (HOST, DEVICE, DISK)}
    store = Store(built.units, wanted, backend, on_device=(4,), on_disk=on_disk, scratch=ScratchFile(tmp_path))
    assert store.disk is not None
    assert planned == {
        HOST: backend.host_bytes + store.disk.ring_bytes,
        DEVICE: backend.device_bytes,
        DISK: store.disk.num_bytes,
    }
    store.close()


@pytest.mark.parametrize(("device_gib", "host_gib", "disk_gib"), [(30, 60, 500), (60, 45, 30), (12, 70, 20)])
def test_books_are_the_byte_table(device_gib: float, host_gib: float, disk_gib: float) -> None:
    question = ask(rows=8, device_gib=device_gib, host_gib=host_gib, disk_gib=disk_gib)
    seen = set()
    for plan, short, least_s in books_beside_the_table(question, list(choices(question))[::97]):
        seen.add(plan.disk_units)
        if not short:
            assert least_s <= question.seconds(plan).step * (1 + 1e-9)
    assert max(seen) > 0


# ---------------------------------------------------------------- the choice


def test_the_disk_is_not_touched_where_host_and_device_have_room() -> None:
    plan, found = search(ask(host_gib=126, disk=1e12))
    assert found and plan.on_disk == () and plan.total(DISK) == 0


def test_as_few_units_as_the_host_lacks_room_for_and_the_last_layers() -> None:
    question = ask(device_gib=24, host_gib=80)
    plan, found = search(question)
    assert found and fits(question, plan)
    layers = len(question.model.layer_units)
    assert plan.on_disk == tuple(range(layers + 1 - plan.disk_units, layers + 1)), "layers from the last on; the head stays"
    home = frozenset(plan.on_device)
    fewer = replace(plan, on_disk=plan.on_disk[1:])
    assert not fits(question, question.complete(fewer)) and not home & set(plan.on_disk)


def test_ends_come_last_because_every_buffer_would_be_as_large() -> None:
    """10 bytes a parameter, of a layer 2.2 GiB, of an end 5.1; less three buffers as large as the largest."""
    question = ask()
    found = DiskBooks(question)
    layers, end = len(question.model.layer_units), len(question.model.units) - 1
    sizes = [state_bytes(unit, question.specs) for unit in question.model.units]
    offered = found.choices(0)
    assert offered[0] == () and all(len(one) > RING for one in offered[1:]), "three buffers for three layers save nothing"
    assert offered[1] == tuple(range(layers - 3, layers + 1))
    rings = [RING * file_bytes(size) for size in sizes]
    assert found.saved(offered[1]) == 4 * sizes[1] - rings[1]
    assert found.saved(tuple(range(1, layers + 1))) == layers * sizes[1] - rings[1]
    assert offered[-1] == tuple(range(end + 1)) and offered[-2] == tuple(range(1, end + 1))
    assert found.saved(offered[-1]) == sum(sizes) - rings[end]
    assert all(0 not in one for one in found.choices(1))


def test_a_pinned_number_is_kept_and_one_that_needs_more_disk_is_refused() -> None:
    plan, found = search(ask(host_gib=126, disk_units=3))
    assert found and plan.disk_units == 3
    assert search(ask(host_gib=126, disk_units=0))[0].on_disk == ()
    decision = decide(ask(host_gib=126, disk_units=10, disk_gib=10))
    assert decision.shortfall is not None and "@disk, 10.0 GiB allowed by disk_memory" in decision.shortfall
    asked = ask(host_gib=126, disk_units=3)
    full = decide(replace(asked, machine=replace(asked.machine, disk_available=0))).shortfall
    assert full is not None and "@disk, 0 bytes allowed" in full, "not passed over in silence"
    with pytest.raises(PlanError, match="disk_units: 3: set disk_memory too"):
        problem(qwen("qwen2.5-7b"), specs(), machine(), config(disk_units=3), 1024)


def test_a_disk_that_every_plan_waits_for_plays_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bounds are the disk's: by them alone 18,000 steps would be played, which takes half a minute."""
    question, real, played = ask("qwen2.5-3b", rows=128, device_gib=139, disk=1.6e9, disk_units=99), Problem.seconds, list[Plan]()

    def seconds(self: Problem, plan: Plan) -> Seconds:
        played.append(plan)
        return real(self, plan)

    monkeypatch.setattr(Problem, "seconds", seconds)
    plan, found = search(question)
    assert len(played) <= 20
    assert found and plan.seconds is not None and plan.seconds.step < 1.02 * plan.seconds.disk
    least = min(
        question.seconds(replace(plan, activation_budget=b, micro_batch_rows=8, num_waves=16)).compute for b in (0.7, 1.0)
    )
    assert plan.seconds.compute < 1.05 * least, "what computes least is tried first"


def test_a_host_that_is_short_is_told_of_the_disk() -> None:
    decision = decide(ask(device_gib=10, host_gib=80, disk_gib=0))
    assert decision.shortfall is not None and "disk_memory: " in decision.shortfall and "of a disk fits" in decision.shortfall


def test_on_one_memory_the_disk_takes_what_device_and_host_lack_together() -> None:
    question = problem(
        qwen("qwen2.5-3b"), specs(), machine(cpu=True, host_gib=35, disk_available=100 * GIB), config(rows=4), 1024
    )
    without = decide(replace(question, machine=replace(question.machine, disk_available=0)))
    plan, found = search(question)
    assert without.shortfall is not None and found and plan.on_disk and fits(question, plan)


def test_the_report_has_bytes_seconds_and_what_is_written_a_day() -> None:
    question = ask(device_gib=24, host_gib=80)
    decision = decide(question)
    plan, text = decision.plan, render(decision.plan, question)
    assert plan.seconds is not None and max(map(len, text.splitlines())) <= 100
    a_day = plan.total(DISK) * 86400 / plan.seconds.step
    words = " ".join(text.split())
    assert f"{a_day / 1e12:.3g} TB a day" in words and "disk_units" in text and "(disk_memory): " in words
    assert "at 2 and 2 GB/s (measured)" in words
    assert plan.seconds.disk == pytest.approx(2 * plan.total(DISK) / 2e9)
    assert "disk_folder lies in host memory" not in words
    noted = with_notes(replace(question, machine=replace(question.machine, disk_in_memory=True)), plan).notes
    assert any(note.startswith("disk_folder lies in host memory (tmpfs): the ") for note in noted)


# ---------------------------------------------------------------- seconds

LAYERS = 7
UNIT = Piece(forward=1.0, backward=2.0, drain=0.0, update=0.5, upload=0.0, bring=0.0, send=0.0, home=False)
END = replace(UNIT, forward=0.0, backward=0.0, update=0.0)


def step(layer: Piece, waves: float = 4.0) -> tuple[float, float]:
    """(waits, the whole step)."""
    program = Program(
        prologue=[END],
        layers=[layer] * LAYERS,
        head=[END],
        tied=False,
        waves=[waves],
        num_slots=LAYERS,
        num_slabs=2,
        resident_gradients=False,
    )
    found = waits(program)
    assert found.copies == 0.0
    return found.updates, found.updates + waves * LAYERS * (layer.forward + layer.backward)


def test_a_disk_that_is_fast_enough_is_not_waited_for() -> None:
    without = step(UNIT)
    assert step(replace(UNIT, fetch=2.0, spill=2.0)) == pytest.approx(without)


def test_a_disk_that_is_slower_than_the_forward_sets_its_pace() -> None:
    """The first units are there. Unit k + 3 takes the buffer of unit k, so its update ends when k + 1 spills and fetches are
    done behind the first update, and its own; its forward begins then, and the last one's takes 4 s."""
    fetch, spill = 5.0, 3.0
    updates, whole = step(replace(UNIT, fetch=fetch, spill=spill, backward=100.0))
    last_update = 0.5 + (LAYERS - RING) * (fetch + spill) + 0.5
    assert updates == pytest.approx(last_update + 4.0 - 4.0 * LAYERS)
    assert whole == pytest.approx(last_update + 4.0 + 4.0 * LAYERS * 100.0)


def test_a_disk_that_is_slower_than_the_step_is_the_step() -> None:
    _, whole = step(replace(UNIT, fetch=50.0, spill=30.0))
    assert whole == pytest.approx(0.5 + LAYERS * 80.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_units_than_buffers(count: int) -> None:
    slow = replace(UNIT, fetch=50.0, spill=30.0)
    program = Program(
        prologue=[END], layers=[*[UNIT] * 3, *[slow] * count], head=[END], tied=False, waves=[1.0], num_slots=9, num_slabs=2,
        resident_gradients=False,
    )  # fmt: skip
    assert waits(program).updates + (3 + count) * 3.0 == pytest.approx(max(2.0 + 80.0 * count, (3 + count) * 3.0))


def test_a_disk_is_predicted_for_a_plan_written_by_hand() -> None:
    question = ask("qwen2.5-3b")
    layers = tuple(unit.index for unit in question.model.layer_units)
    slow = question.complete(
        replace(
            Plan(compile=True, micro_batch_rows=16, activation_budget=0.0, row_tokens=1024), rows_per_step=128, on_disk=layers
        )
    )
    assert slow.seconds is not None
    assert slow.seconds.step >= slow.seconds.disk == pytest.approx(2 * slow.total(DISK) / 2e9)
