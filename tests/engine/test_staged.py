"""Updates in stages: the engine with Muon against the serial order, against torch, under every plan, and when something fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerferry.backends.base import Lane
from layerferry.backends.chaos import ChaosBackend
from layerferry.backends.cpu import CpuBackend
from layerferry.engine.engine import clip_coefficient
from layerferry.engine.oracle import WholeRows, loss_and_gradients
from layerferry.layout import GRAD
from layerferry.objectives import OnLogits
from layerferry.optim import orthogonal
from layerferry.optim.base import StepHyper
from layerferry.optim.muon import Muon
from layerferry.optim.orthogonal import stacks_of
from layerferry.optim.verified import verified
from layerferry.plan import Plan
from tests.conformance.harness import make_engine, masters, micro_batches
from tests.engine.small import check_against_optimizer_alone, clipped_steps, load_weights, same, small_model, state

PLAN = Plan(fp32=True, num_slots=2, num_slabs=1)
RATES = (1e-2, 3e-3, 2e-2)
LIMIT = 0.3
"""Far below the norm of these gradients: clipping is active in every step."""


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_equal_to_the_whole_model_and_the_optimizer_alone(model_type: str, fp32: bool) -> None:
    """No engine on the other side: the model's own autograd, a norm, and ``Muon.step`` over planes, unit after unit."""
    dtype = torch.float32 if fp32 else torch.bfloat16
    model = small_model(model_type=model_type, dtype=dtype)
    plan = replace(PLAN, fp32=fp32)
    engine = make_engine(model, plan, optimizer=Muon(weight_decay=0.1), backend=ChaosBackend(4))
    alone = make_engine(model, plan, optimizer=Muon(weight_decay=0.1))  # only its planes are used
    check_against_optimizer_alone(engine, alone, model, RATES, limit=LIMIT)


def test_matrices_go_the_way_of_torchs_muon() -> None:
    """Three clipped steps beside ``torch.optim.Muon`` on the model's own gradients. Where the update that is orthogonalised lies
    within an fp32 rounding of the middle of two bf16 numbers, the two may take different ones: a handful of elements, each by
    2**-8 of itself, which the iteration stretches by at most 3.4445**5 along directions that are hardly there. A wrong momentum,
    scale or decay would be off by tenths of the way."""
    model = small_model()
    engine = make_engine(small_model(), PLAN, optimizer=Muon(weight_decay=0.1))
    own = [unit.names[e.name] for unit in engine.store.units for e in unit.layout.entries if e.matrix]
    assert own and all(".layers." in name and "norm" not in name for name in own)
    start = {name: value.clone() for name, value in masters(engine).items()}
    parameters = {name: torch.nn.Parameter(start[name].clone()) for name in own}
    theirs = torch.optim.Muon(parameters.values(), lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step, lr in enumerate(RATES):
        load_weights(model, engine)
        batches = micro_batches(2, seed=step)
        _, found = loss_and_gradients(model, batches)
        report = engine.step(batches, WholeRows(), lr=lr, max_grad_norm=LIMIT)
        for name in own:
            parameters[name].grad = found[name] * clip_coefficient(report.grad_norm, LIMIT)
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        engine.settle()
    after = masters(engine)
    for name in own:
        ours, reference = after[name] - start[name], parameters[name].detach() - start[name]
        assert float((ours - reference).norm()) < 0.02 * float(reference.norm()), name
    engine.close()


SHAPES = [
    PLAN,
    replace(PLAN, num_slots=3, num_slabs=2, num_waves=2, carry_fp32=True),
    replace(PLAN, on_device=(1, 3), optimizer_threads=2),
    replace(PLAN, on_device=(0, 1, 2, 3, 4)),
]


def clip_twice(backend: CpuBackend, plan: Plan) -> dict[str, Tensor]:
    engine = make_engine(small_model(layers=3), plan, backend=backend, optimizer=Muon(weight_decay=0.1))
    for step in range(2):
        engine.step(micro_batches(2, rows=1, tokens=6, seed=step), lr=1e-2, max_grad_norm=LIMIT)
    left = state(engine)
    engine.close()
    return left


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_orders_of_events_give_the_same_bits(number: int) -> None:
    truth = clip_twice(CpuBackend(), PLAN)
    for seed in range(8 * number, 8 * (number + 1)):
        backend = ChaosBackend(seed, eagerness=(0.0, 0.1, 0.5, 1.0)[seed % 4])
        assert same(clip_twice(backend, SHAPES[number]), truth), seed


def test_stacks_of_experts_are_the_same_under_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices at a time, and the last one of an odd number alone."""
    monkeypatch.setattr(orthogonal, "MOST_ELEMENTS", 1024)
    stacks_of.cache_clear()
    model = small_model(model_type="qwen3_moe")
    plan = replace(PLAN, fp32=False)
    expected = clipped_steps(make_engine(model, plan, backend=CpuBackend(), optimizer=Muon()), 2)
    for changed in ({"on_device": (1, 2)}, {"num_slots": 5, "optimizer_threads": 2}):
        engine = make_engine(model, replace(plan, **changed), backend=ChaosBackend(2), optimizer=Muon())
        assert max(s.count for u in engine.store.units for s in stacks_of(u.layout)) > 1
        found = clipped_steps(engine, 2)
        assert found[0] == expected[0] and same(found[1], expected[1])
    stacks_of.cache_clear()


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    engine, fresh = (make_engine(small_model(), PLAN, optimizer=Muon()) for _ in range(2))
    for each in (engine, fresh):
        each.step(micro_batches(2), lr=1e-2)
    before = state(engine)
    report = engine.step(micro_batches(2), OnLogits(lambda logits, labels: (logits * torch.inf).sum()), lr=1e-2)
    assert report.skipped and same(state(engine), before)
    for each in (engine, fresh):
        each.step(micro_batches(2, seed=1), lr=1e-2)
    assert same(state(engine), state(fresh))
    engine.close()
    fresh.close()


@pytest.mark.parametrize("stage", ["prepare", "orthogonalise", "finish"])
def test_a_failing_stage_reaches_whoever_needs_the_unit(stage: str) -> None:
    class Failing(Muon):
        pass

    def fail(*_: Any) -> None:
        raise OSError("bad memory")

    setattr(Failing, stage, fail)
    engine = make_engine(small_model(), PLAN, optimizer=Failing(), backend=CpuBackend())
    engine.step(micro_batches(1), lr=1e-2)
    with pytest.raises(OSError, match="bad memory"):
        engine.step(micro_batches(1), lr=1e-2)
    with pytest.raises(OSError, match="bad memory"):
        engine.settle()
    engine.close()


def test_the_next_unit_begins_before_one_is_finished() -> None:
    """The order of the worker's jobs: what it computes while the device has a unit."""
    seen: list[str] = []

    class Watched(Muon):
        def step(self, planes: Any, layout: Any, *rest: Any) -> None:
            seen.append(f"step {len(layout.entries)}")
            super().step(planes, layout, *rest)

        def prepare(self, planes: Any, layout: Any, *rest: Any) -> None:
            if stacks_of(layout):
                seen.append("begin")
            super().prepare(planes, layout, *rest)

        def finish(self, planes: Any, layout: Any, *rest: Any) -> None:
            if stacks_of(layout):
                seen.append("finish")
            super().finish(planes, layout, *rest)

    engine = make_engine(small_model(), PLAN, optimizer=Watched(), backend=CpuBackend())
    engine.step(micro_batches(1), lr=1e-2)
    engine.settle()
    assert seen == ["step 1", "begin", "begin", "finish", "begin", "finish", "step 2", "finish"]
    assert engine.deferred.num_done == 5
    moved = engine.deferred.stages.moved_bytes
    matrices = sum(entry.numel for unit in engine.store.units for entry in unit.layout.entries if entry.matrix)
    assert moved == 2 * 4 * matrices
    engine.close()


def test_a_holder_keeps_the_unit_as_the_step_has_left_it() -> None:
    """The next update waits for whoever reads a unit, and is complete afterwards."""
    engine, plain = (make_engine(small_model(), PLAN, optimizer=Muon(), backend=CpuBackend()) for _ in range(2))
    for each in (engine, plain):
        each.step(micro_batches(1), lr=1e-2)
    unit = engine.store.units[2]
    hold = engine.deferred.hold(unit)
    hold.settled.result().synchronize()
    before = [plane.buffer.clone() for kind, plane in engine.store.planes(unit).items() if kind != GRAD]
    # the worker is stopped at this unit: a second step's updates are queued behind the holder
    hyper = StepHyper(lr=1e-2, step=2)
    drained = {each.index: engine.backend.record(Lane.DOWNLOAD) for each in engine.store.units}
    plain.deferred.defer(plain.update_order, hyper, drained)
    engine.deferred.defer(engine.update_order, hyper, drained)
    after = [plane.buffer.clone() for kind, plane in engine.store.planes(unit).items() if kind != GRAD]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    hold.released.set_result(engine.backend.record(Lane.HOST))
    assert same(state(engine), state(plain))
    engine.close()
    plain.close()


def test_memory_that_forgets_is_found_in_stages_too() -> None:
    engine = make_engine(small_model(), PLAN, optimizer=verified(Muon()), backend=CpuBackend())
    for step in range(2):
        engine.step(micro_batches(1, seed=step), lr=1e-2)
    engine.settle()
    buffer = engine.store.plane(engine.store.units[1], "momentum_buffer").buffer
    buffer[len(buffer) // 2] ^= 0x01
    with pytest.raises(Exception, match="verify_memory: plane momentum_buffer"):
        for step in range(2, 4):
            engine.step(micro_batches(1, seed=step), lr=1e-2)
            engine.settle()
    engine.close()
