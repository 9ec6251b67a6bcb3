"""What updates cost in the plan: bytes moved by format, and for Muon bytes, products and copies as the engine has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layerferry.engine.engine import Engine
from layerferry.layout import MATRICES, OTHERS, PlaneSpec
from layerferry.optim import orthogonal
from layerferry.optim.adafactor import Adafactor
from layerferry.optim.adamw import AdamW
from layerferry.optim.formats import StateFormat
from layerferry.optim.lion import Lion
from layerferry.optim.muon import Muon
from layerferry.optim.orthogonal import stacks_of
from layerferry.plan import Plan
from layerferry.planner.books import Books
from layerferry.planner.candidates import choices
from layerferry.planner.choose import decide
from layerferry.planner.facts import Model
from layerferry.planner.held import DEVICE, HOST
from layerferry.planner.memory import buffers, items, plan_specs
from layerferry.planner.problem import Problem, needs, problem
from layerferry.planner.program import Waits
from layerferry.planner.search import _base, search
from layerferry.planner.time import busy, seconds
from layerferry.planner.updates import (
    LANE_WORKSPACE_BYTES,
    ORTHOGONAL_SHARE,
    finish_s,
    moved_bytes_per_param,
    orthogonal_s,
    trip_bytes,
    update_s,
    with_update_rate,
)
from layerferry.planner.working import Shape
from layerferry.store.store import Store, plane_specs
from tests.planner.subjects import config, machine, qwen, skeleton, specs
from tests.planner.test_memory import CountingBackend
from tests.planner.test_schedule import END, FREE, step
from tests.planner.test_time import batches

LEAN = StateFormat(master="24bit", moments="8bit")
SHAPE = Shape(row_tokens=8, rows_per_step=4)


def muon(**options: Any) -> dict[str, PlaneSpec]:
    return plane_specs(Muon(**options).state_planes)


def test_bytes_that_a_pass_moves() -> None:
    """AdamW: 14 read, 12 written. Matrices: gradient and momentum both ways, then master both ways and what the device left.
    Adafactor: the gradient three times, master both ways."""
    assert moved_bytes_per_param(specs()) == 26
    assert moved_bytes_per_param(plane_specs(AdamW(state_format=LEAN).state_planes)) == 12 + 4 / 128
    assert moved_bytes_per_param(plane_specs(Lion().state_planes)) == 18
    for master, residue in (("fp32", 2), ("24bit", 1), ("bf16", 0)):
        factored = plane_specs(Adafactor(state_format=StateFormat(master=master)).state_planes)
        assert moved_bytes_per_param(factored) == moved_bytes_per_param(factored, MATRICES) == 3 * 2 + (2 + residue) * 2
    assert moved_bytes_per_param(muon(), MATRICES) == (2 + 4) * 2 + (2 + 2) * 2 + 2
    assert moved_bytes_per_param(muon(), OTHERS) == 14 + 4 / 128
    assert moved_bytes_per_param(muon(state_format=LEAN), MATRICES) == (2 + 1 + 1 / 128) * 2 + (2 + 1) * 2 + 2


def test_seconds_of_a_unit_are_those_of_its_parts() -> None:
    wanted, plain = with_update_rate(machine(), muon()), machine()
    layer, ends = (next(u.layout for u in skeleton("qwen2").units if u.is_layer is kind) for kind in (True, False))
    assert wanted.others_s_per_param is not None
    matrices, others = plain.optimizer_s_per_param.value * 22 / 26, plain.coded_optimizer_s_per_param.value * 14 / 12
    assert wanted.optimizer_s_per_param.value == pytest.approx(matrices)
    assert wanted.others_s_per_param.value == pytest.approx(others, rel=1e-2)
    rest = layer.num_trained - layer.num_in_matrices
    assert rest == sum(e.numel for e in layer.entries if len(e.shape) == 1)
    assert update_s(layer, wanted) == pytest.approx(layer.num_in_matrices * matrices + rest * others, rel=1e-2)
    assert finish_s(layer, wanted) == pytest.approx(layer.num_in_matrices * matrices * 10 / 22)
    assert update_s(ends, wanted) == pytest.approx(ends.num_trained * others, rel=1e-2) and finish_s(ends, wanted) == 0.0
    assert update_s(layer, with_update_rate(plain, specs())) == layer.num_trained * plain.optimizer_s_per_param.value


def test_products_of_a_7b() -> None:
    """Five steps of 4 m^2 n + 2 m^3 for every matrix: three of 3,584 x 18,944, two of 3,584 x 3,584, two of 512 x 3,584."""

    def five(m: float, n: float) -> float:
        return 5 * (4 * m * m * n + 2 * m**3)

    by_hand = 28 * (3 * five(3584, 18944) + 2 * five(3584, 3584) + 2 * five(512, 3584))
    wanted = with_update_rate(machine(), muon())
    found = sum(orthogonal_s(unit.layout, wanted) for unit in qwen("qwen2.5-7b").units)
    assert found == pytest.approx(by_hand / (wanted.matmul_flops_per_s.value * ORTHOGONAL_SHARE))
    assert 0.7 < found < 1.1
    assert sum(orthogonal_s(unit.layout, with_update_rate(machine(), specs())) for unit in qwen("qwen2.5-7b").units) == 0.0


@pytest.mark.parametrize(("family", "fp32"), [("llama", False), ("llama", True), ("qwen3_moe", False)])
@pytest.mark.parametrize(("home", "carry"), [((), False), ((), True), ((0, 2), True), (tuple(range(6)), False)])
def test_the_engine_allocates_and_moves_what_was_planned(
    family: str, carry: bool, home: tuple[int, ...], fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal, "MOST_ELEMENTS", 2048)
    stacks_of.cache_clear()
    built = skeleton(family, fp32=fp32, tie_word_embeddings=False)
    plan = Plan(fp32=fp32, num_waves=2, carry_fp32=carry, micro_batch_rows=2, rows_per_step=4, on_device=home)
    model, backend, wanted = Model.of(built), CountingBackend(), plan_specs(muon(), plan)
    planned = items(model, muon(), plan, SHAPE)
    store = Store(built.units, wanted, backend, on_device=home)
    in_device = backend.device_bytes
    assert sum(item.num_bytes for item in planned if item.place == HOST) == store.num_bytes - in_device
    engine = Engine(built, store, Muon(), backend, plan)
    own = sum(item.num_bytes for item in buffers(model, wanted, plan))
    assert own - LANE_WORKSPACE_BYTES == backend.device_bytes - in_device
    engine.step(batches(), lr=1e-3)
    engine.settle()
    away = [unit for unit in built.units if unit.index not in home]
    assert engine.deferred.stages.moved_bytes == 2 * sum(trip_bytes(unit.layout, wanted) for unit in away)
    engine.close()
    stacks_of.cache_clear()


def test_frozen_matrices_cost_nothing() -> None:
    built = skeleton("llama", frozen={"freeze_trainable_layers": 1, "freeze_trainable_modules": ("mlp",)})
    model, backend = Model.of(built), CountingBackend()
    store = Store(built.units, muon(), backend)
    assert sum(item.num_bytes for item in items(model, muon(), Plan(), SHAPE) if item.place == HOST) == store.num_bytes
    assert {stack.entry.name for unit in built.units for stack in stacks_of(unit.layout)} == {
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }
    engine = Engine(built, store, Muon(), backend, Plan())
    before = [plane.clone() for plane in store.plane(built.units[1], "weight").tensors()]
    engine.step(batches(), lr=1e-3)
    engine.settle()
    assert all(torch.equal(a, b) for a, b in zip(before, store.plane(built.units[1], "weight").tensors(), strict=True))
    engine.close()


def test_a_7b_takes_less_than_ten_bytes_a_parameter() -> None:
    model = qwen("qwen2.5-7b")
    host = sum(item.num_bytes for item in items(model, muon(), Plan(), SHAPE) if item.place == HOST)
    assert 9.6 < host / model.num_params < 9.8
    lean = sum(item.num_bytes for item in items(model, muon(state_format=LEAN), Plan(), SHAPE) if item.place == HOST)
    assert 6.0 < lean / model.num_params < 6.2


# -------------------------------------------------------------------- seconds


def test_the_device_has_a_unit_while_the_worker_begins_the_next() -> None:
    """Halves of 1 s, 0.5 s on the device: the first unit is ready after two first halves and its own second half, and from then
    on one is ready every 2 s; a forward of 4 s hides all but the first."""
    staged = replace(FREE, update=2.0, finish=1.0, orthogonal=0.25, trip=0.25)
    assert step(staged) == Waits(pytest.approx(3.0), 0.0)  # type: ignore[arg-type]
    # the device is slower than the worker: the first is ready after 1 + 3 + 1 s, then one every 3 s, which compute pays for
    slow = replace(staged, forward=0.0, orthogonal=3.0, trip=0.0)
    assert step(slow).updates == pytest.approx(5.0)
    assert step(staged, end=replace(END, update=3.0)).updates == pytest.approx(6.0)


def test_a_step_has_the_products_the_passes_and_the_copies_in_it() -> None:
    model, there = qwen("qwen2.5-7b"), machine()
    plan = Plan(compile=True, activation_budget=0.0, micro_batch_rows=32, row_tokens=1024, rows_per_step=128)
    shape = Shape(row_tokens=1024, rows_per_step=128, fused_head=True)
    plain = busy(model, specs(), plan, shape, with_update_rate(there, specs()))
    wanted = with_update_rate(there, muon())
    found = busy(model, muon(), plan, shape, wanted)
    products = sum(orthogonal_s(unit.layout, wanted) for unit in model.units)
    assert found.compute == pytest.approx(plain.compute + products)
    matrices = sum(unit.layout.num_in_matrices for unit in model.units)
    assert found.upload - plain.upload == pytest.approx(2 * matrices / wanted.upload_together_bytes_per_s.value)
    assert found.download - plain.download == pytest.approx(2 * matrices / wanted.download_together_bytes_per_s.value)
    assert seconds(model, muon(), plan, shape, wanted).step < 1.12 * seconds(model, specs(), plan, shape, there).step


def ask(device_gib: float) -> Problem:
    return problem(qwen("qwen2.5-3b"), muon(), machine(device_gib=device_gib), config(rows=8), 1024)


@pytest.mark.parametrize("device_gib", [14, 60])
def test_the_books_are_the_byte_table_and_bound_the_seconds(device_gib: float) -> None:
    question = ask(device_gib)
    books, base = Books(question), _base(question)
    for choice in list(choices(question))[::211]:
        furnished, _ = books.furnished(choice)
        plan = question.complete(furnished.on(base))
        places = needs(plan, question.machine)
        assert (books.host(furnished), books.device(furnished)) == (places[HOST][0], places[DEVICE][0])
        assert books.least_seconds(furnished) <= question.seconds(plan).step * (1 + 1e-9)
    plan, found = search(question)
    assert found and any("orthogonalised" in item.what for item in plan.items)


def test_a_host_that_is_too_small_is_offered_a_momentum_of_8_bits() -> None:
    there, few = machine(device_gib=20, host_gib=50), config(chunk_tokens=4096, num_slots=3, num_slabs=2)
    shortfall = decide(problem(qwen("qwen2.5-7b"), muon(), there, few, 1024)).shortfall
    assert shortfall is not None and "optim: muon_8bit fits (" in shortfall and "adamw" not in shortfall
    assert decide(problem(qwen("qwen2.5-7b"), muon(state_format=LEAN), there, few, 1024)).shortfall is None
