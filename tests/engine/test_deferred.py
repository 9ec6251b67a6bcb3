"""The deferred step against the serial order, against the optimizer alone, and against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layerferry.backends.chaos import ChaosBackend
from layerferry.engine.arrivals import HalfTakenStep
from layerferry.engine.engine import clip_coefficient
from layerferry.optim.adamw import AdamW
from layerferry.optim.reference import ReferenceKernels
from layerferry.plan import Plan
from tests.conformance.harness import gradients, make_engine, masters, micro_batches
from tests.engine.small import check_against_optimizer_alone, same, small_model, state

PLAN = Plan(fp32=True, num_slots=2, num_slabs=1)
RATES = (1e-2, 3e-3, 2e-2, 0.0, 1e-3)
LIMIT = 0.3
"""Far below the norm of these gradients: clipping is active in every step."""


def optimizer() -> AdamW:
    return AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, kernels=ReferenceKernels())


@pytest.mark.parametrize("fp32", [True, False])
def test_equal_to_settling_after_every_step(fp32: bool) -> None:
    model = small_model()
    plan = Plan(fp32=fp32, num_slots=2, num_slabs=1)
    deferred = make_engine(model, plan, optimizer=optimizer(), backend=ChaosBackend(5))
    serial = make_engine(model, plan, optimizer=optimizer())
    for step, lr in enumerate(RATES):
        reports = [engine.step(micro_batches(2, seed=step), lr=lr, max_grad_norm=LIMIT) for engine in (deferred, serial)]
        serial.settle()
        assert reports[0].loss == reports[1].loss and reports[0].grad_norm == reports[1].grad_norm > LIMIT
    assert same(state(deferred), state(serial))
    deferred.close()
    serial.close()


@pytest.mark.parametrize("fp32", [True, False])
def test_equal_to_the_whole_model_and_the_optimizer_alone(fp32: bool) -> None:
    """No engine on the other side: the model's own autograd, a norm, and ``AdamW.step`` over planes, unit after unit."""
    dtype = torch.float32 if fp32 else torch.bfloat16
    model = small_model(dtype=dtype)
    engine = make_engine(model, Plan(fp32=fp32, num_slots=2, num_slabs=1), optimizer=optimizer())
    alone = make_engine(model, Plan(fp32=fp32, num_slots=2, num_slabs=1), optimizer=optimizer())  # only its planes are used
    check_against_optimizer_alone(engine, alone, model, RATES, limit=LIMIT)


def test_close_to_torchs_adamw_and_clipping() -> None:
    """torch in fp64 on the gradients that the engine had. Per step and element the engine rounds a dozen times, each by at most
    u = 2^-24 of a number no larger than |w| + lr * 2 (an AdamW update is at most lr * |m| / sqrt(v) <= lr * 2 here, with the
    decay lr * 0.1 * |w|); the norm is a sum of n squares, whose fp32 error is at most n / 2 roundings of itself, and scales the
    update alone. Errors of K steps add up."""
    engine = make_engine(small_model(), PLAN, optimizer=optimizer())
    names = list(masters(engine))
    mirror = {name: torch.nn.Parameter(value.double()) for name, value in masters(engine).items()}
    theirs = torch.optim.AdamW(mirror.values(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    count = sum(parameter.numel() for parameter in mirror.values())
    for step, lr in enumerate(RATES):
        report = engine.step(micro_batches(2, seed=step), lr=lr, max_grad_norm=LIMIT)
        for name, gradient in gradients(engine).items():
            mirror[name].grad = gradient.double()
        theirs.param_groups[0]["lr"] = lr
        norm = float(torch.nn.utils.clip_grad_norm_(list(mirror.values()), LIMIT))
        assert abs(report.grad_norm - norm) <= (count / 2 + 4) * 2.0**-24 * norm
        theirs.step()
    left, u = masters(engine), 2.0**-24
    update = 2 * sum(RATES)
    for name in names:
        weight = mirror[name].detach()
        bound = len(RATES) * 12 * u * (weight.abs() + update) + (count / 2) * u * update
        assert bool(((left[name].double() - weight).abs() <= bound).all()), name
    engine.close()


@pytest.mark.parametrize("places", [(), (1,), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("num_waves", [1, 2])
def test_the_reported_norm_is_that_of_the_gradient_before_clipping(places: tuple[int, ...], num_waves: int) -> None:
    """In every combination of places and in every step, whatever was clipped before: neither stale nor clipped."""
    plan = Plan(fp32=True, num_slots=2, num_slabs=1, on_device=places, num_waves=num_waves, carry_fp32=True)
    engine = make_engine(small_model(), plan)
    for step in range(3):
        report = engine.step(micro_batches(2, seed=step), lr=1e-2, max_grad_norm=LIMIT)
        found = gradients(engine).values()
        exact = torch.linalg.vector_norm(torch.cat([g.flatten() for g in found]).double()).item()
        count = sum(gradient.numel() for gradient in found)
        assert abs(report.grad_norm - exact) <= (count / 2 + 4) * 2.0**-24 * exact
    engine.close()


def test_clip_coefficient_is_torchs() -> None:
    for norm in (0.1, 0.3, 0.30000004, 1.0, 12.5, 1e6):
        gradient = torch.tensor([norm], dtype=torch.float32)
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([parameter], LIMIT)
        assert float(gradient * clip_coefficient(float(gradient), LIMIT)) == float(parameter.grad)
    assert clip_coefficient(5.0, 0.0) == 1.0


def test_a_failing_update_reaches_whoever_needs_the_unit() -> None:
    class Failing(AdamW):
        def step(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("disk full")

    engine = make_engine(small_model(), PLAN, optimizer=Failing(kernels=ReferenceKernels()))
    engine.step(micro_batches(1), lr=1e-2)
    with pytest.raises(OSError, match="disk full"):
        engine.step(micro_batches(1), lr=1e-2)
    with pytest.raises(OSError, match="disk full"):
        engine.settle()
    engine.close()


def test_an_update_that_fails_on_the_device_spoils_the_weights_behind_others() -> None:
    """It is made at once, and what runs out of memory there has left earlier units updated: the step cannot be taken again."""

    class Full(AdamW):
        num_updates = 0

        def step(self, *args: Any, **kwargs: Any) -> None:
            self.num_updates += 1
            if self.num_updates == 3:
                raise torch.OutOfMemoryError("full")
            super().step(*args, **kwargs)

    engine = make_engine(small_model(), replace(PLAN, on_device=(0, 1, 2, 3, 4)), optimizer=Full(kernels=ReferenceKernels()))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        engine.step(micro_batches(1), lr=1e-2)
    with pytest.raises(HalfTakenStep, match=r"step 1 broke off .* \(OutOfMemoryError: full\)"):
        engine.step(micro_batches(1), lr=1e-2)
    engine.close()


def test_small_learning_rates_move_the_weights_as_fp32_does() -> None:
    """bf16 weights do not see an update of 1e-6; the split master does, in fp32's direction."""
    model = small_model(dtype=torch.bfloat16)
    engine = make_engine(model, Plan(num_slots=2, num_slabs=1))
    before = masters(engine)
    for step in range(3):
        engine.step(micro_batches(2, seed=step), lr=1e-6)
    after = masters(engine)
    moved = torch.cat([(after[n] != before[n]).flatten() for n in after if ".layers." in n])
    assert moved.float().mean() > 0.9
    rounded = torch.cat([(after[n].bfloat16() != before[n].bfloat16()).flatten() for n in after if ".layers." in n])
    assert rounded.float().mean() < 0.1
    engine.close()
