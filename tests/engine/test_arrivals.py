"""Updates on arrival: the bits of the deferred step without clipping, no gradient planes, and what it cannot do is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerferry.backends.chaos import ChaosBackend
from layerferry.backends.cpu import CpuBackend
from layerferry.engine.arrivals import HalfTakenStep, SpoiltStep
from layerferry.engine.engine import Engine
from layerferry.engine.sizes import arrival_sizes
from layerferry.engine.tape import Tape
from layerferry.errors import ConfigError, LayerFerryError, PlanError
from layerferry.layout import GRAD
from layerferry.optim.adafactor import Adafactor
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import Optimizer
from layerferry.optim.formats import StateFormat
from layerferry.optim.muon import Muon
from layerferry.plan import Plan
from layerferry.units import Unit
from tests.conformance.harness import make_engine, micro_batches
from tests.engine.small import same, small_model, state

BASE = Plan(fp32=True, num_slots=2, num_slabs=1, carry_fp32=True)
ARRIVING = replace(BASE, carry_fp32=False, on_arrival=True)
LAYERS = 5
"""More than there are buffers."""


def run(
    plan: Plan, *, chaos: int | None = None, optimizer: Optimizer | None = None, **model: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Four steps, an evaluation among them; losses, norms, and the state that is left."""
    backend = CpuBackend() if chaos is None else ChaosBackend(chaos)
    made = make_engine(small_model(layers=LAYERS, **model), plan, backend=backend, optimizer=optimizer)
    seen = []
    for step in range(4):
        report = made.step(micro_batches(4, seed=step), lr=1e-2 / (1 + step), max_grad_norm=0.0)
        seen += [report.loss, report.grad_norm]
        if step == 1:
            seen.append(made.evaluate(micro_batches(2, seed=9)).loss)
    left = state(made)
    made.close()
    return seen, left


@pytest.fixture(scope="module")
def deferred() -> tuple[list[float], dict[str, Tensor]]:
    return run(BASE)


CHANGES: list[dict[str, Any]] = [
    {},
    {"num_slots": 5, "num_slabs": 2},
    {"activation_budget": 0.0},
    {"num_waves": 2, "resident_gradients": True},
    {"end_parts": 3},
    {"on_disk": (0, 2, 3, 4, 6)},
    {"on_device": (0, 2)},
    {"on_device": (0, 1, 2, 3, 4, 5, 6)},
    {"host_inputs": 2, "micro_batch_rows": 2, "row_tokens": 16, "rows_per_step": 8},
    {"optimizer_threads": 2},
]


@pytest.mark.parametrize("changed", CHANGES, ids=str)
@pytest.mark.parametrize("chaos", [None, 1, 7])
def test_equal_to_the_deferred_step(changed: dict[str, Any], chaos: int | None, deferred: Any) -> None:
    seen, left = run(replace(ARRIVING, **changed), chaos=chaos)
    regroups = "end_parts" in changed or "host_inputs" in changed  # sums of logits, of evaluated micro-batches
    expected = run(replace(BASE, **changed)) if regroups else deferred
    assert seen == expected[0] and same(left, expected[1])


@pytest.mark.parametrize("fp32", [True, False])
def test_a_tied_model_and_other_formats(fp32: bool) -> None:
    lean = StateFormat(master="bf16" if not fp32 else "fp32", moments="8bit")
    for optimizer in (AdamW(state_format=lean, weight_decay=0.1), Adafactor(), Muon(weight_decay=0.1)):
        plan = replace(BASE, fp32=fp32, carry_fp32=False)
        expected = run(plan, optimizer=optimizer, tie_word_embeddings=True)
        for on_disk in ((), (0, 2, 3)):
            arriving = replace(plan, on_arrival=True, on_disk=on_disk)
            seen, left = run(arriving, chaos=3, optimizer=optimizer, tie_word_embeddings=True)
            assert seen == expected[0] and same(left, expected[1])


class Counting(CpuBackend):
    """Adds up what is asked for @host."""

    def __init__(self) -> None:
        super().__init__()
        self.host_bytes = 0

    def host_buffer(self, num_bytes: int, *, travels: bool) -> Tensor:
        self.host_bytes += num_bytes
        return super().host_buffer(num_bytes, travels=travels)


@pytest.mark.parametrize("on_device", [(), (0, 2)])
def test_no_gradient_has_a_plane_at_the_host(on_device: tuple[int, ...]) -> None:
    plan = replace(ARRIVING, fp32=False, on_device=on_device)
    backend = Counting()
    engine = make_engine(small_model(layers=LAYERS, dtype=torch.bfloat16), plan, backend=backend)
    units = engine.store.units
    away = [unit for unit in units if unit.index not in on_device]
    assert all((GRAD in engine.store.planes(unit)) == (unit.index in on_device) for unit in units)
    buffers = sum(count * num_bytes for count, num_bytes in arrival_sizes(units, plan, engine.store.specs).values())
    planes = sum(unit.layout.bytes(spec) for unit in away for kind, spec in engine.store.specs.items() if kind != GRAD)
    assert backend.host_bytes == planes + buffers
    layer, end = (max(u.layout.bytes(engine.store.specs[GRAD]) for u in away if u.is_layer is kind) for kind in (True, False))
    assert buffers == 3 * layer + end
    engine.close()


def broken(engine: Engine) -> None:
    """One weight of a layer is not a number."""
    unit = engine.store.units[2]
    entry = unit.layout.entries[0]
    value = engine.store.master(unit, entry)
    value.view(-1)[0] = float("nan")
    engine.store.set_parameter(unit, entry, value)


def test_a_step_that_is_not_finite_ends_the_run_and_says_so() -> None:
    engine = make_engine(small_model(layers=LAYERS), ARRIVING)
    engine.step(micro_batches(2), lr=1e-3, max_grad_norm=0.0)
    engine.settle()
    broken(engine)
    with pytest.raises(
        LayerFerryError, match=r"step 2 was not finite .* could not be skipped: .* update_on_arrival: false skips such a step"
    ):
        engine.step(micro_batches(2), lr=1e-3, max_grad_norm=0.0)
    with pytest.raises(SpoiltStep, match="step 2 was not finite"):
        engine.settle()
    engine.close()


class Boom(Exception):
    """Not one of ours."""


class EndsLow(Tape):
    """Breaks off in the backward of the lowest layer."""

    def backward(self, unit: Unit, *args: Any, **kwargs: Any) -> Any:
        if unit.name == "layer.0":
            raise Boom("no such\nthing")
        return super().backward(unit, *args, **kwargs)


class EndsHigh(Tape):
    """Breaks off in the forward of the highest layer."""

    def forward(self, unit: Unit, *args: Any, **kwargs: Any) -> Any:
        if unit.name == f"layer.{LAYERS - 1}":
            raise Boom("no such thing")
        return super().forward(unit, *args, **kwargs)


def test_a_step_that_breaks_off_behind_its_first_update_is_the_last() -> None:
    """Weights of two steps are neither measured nor saved, and no step goes on from them."""
    engine = make_engine(small_model(layers=LAYERS), ARRIVING)
    engine.step(micro_batches(4), lr=1e-2, max_grad_norm=0.0)
    engine.tape_type = EndsLow
    with pytest.raises(Boom):
        engine.step(micro_batches(4, seed=1), lr=1e-2, max_grad_norm=0.0)
    engine.tape_type = Tape
    for use in (
        lambda: engine.step(micro_batches(4), lr=1e-2, max_grad_norm=0.0),
        lambda: engine.evaluate(micro_batches(2)),
        lambda: engine.replan(ARRIVING),
        engine.settle,
    ):
        with pytest.raises(HalfTakenStep, match=r"^step 2 broke off .* been made \(Boom: no such\): .* of two steps"):
            use()
    engine.close()


@pytest.mark.parametrize("chaos", [None, 2])
def test_a_step_that_breaks_off_before_its_first_update_is_no_step(chaos: int | None, deferred: Any) -> None:
    """And another plan behind it changes no bit either."""
    made = make_engine(small_model(layers=LAYERS), ARRIVING, backend=CpuBackend() if chaos is None else ChaosBackend(chaos))
    seen = []
    for step in range(4):
        made.tape_type = EndsHigh
        with pytest.raises(Boom):
            made.step(micro_batches(4, seed=step), lr=1e-2, max_grad_norm=0.0)
        made.tape_type = Tape
        if step == 2:
            made.replan(replace(ARRIVING, num_slots=3, activation_budget=0.0))
        report = made.step(micro_batches(4, seed=step), lr=1e-2 / (1 + step), max_grad_norm=0.0)
        seen += [report.loss, report.grad_norm]
        if step == 1:
            seen.append(made.evaluate(micro_batches(2, seed=9)).loss)
    assert seen == deferred[0] and same(state(made), deferred[1])
    made.close()


def test_clipping_and_carried_gradients_are_refused() -> None:
    model = small_model(layers=LAYERS)
    engine = make_engine(model, ARRIVING)
    with pytest.raises(ConfigError, match=r"max_grad_norm: 1 needs .* set max_grad_norm to 0"):
        engine.step(micro_batches(2), lr=1e-3, max_grad_norm=1.0)
    engine.close()
    with pytest.raises(PlanError, match="num_waves: 2 waves sum their gradients @host"):
        make_engine(model, replace(ARRIVING, num_waves=2))


class Failing(AdamW):
    def step(self, *args: Any) -> None:
        raise OSError("no such thing")


def test_a_failing_update_reaches_the_caller() -> None:
    engine = make_engine(small_model(layers=LAYERS), ARRIVING, optimizer=Failing())
    with pytest.raises(OSError, match="no such thing"):
        for _ in range(2):
            engine.step(micro_batches(2), lr=1e-3, max_grad_norm=0.0)
    engine.close()
