"""A model small enough to be trained hundreds of times in a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import Engine, clip_coefficient
from layerferry.engine.oracle import WholeRows, loss_and_gradients
from layerferry.layout import GRAD
from layerferry.optim.base import StepHyper
from layerferry.plan import Plan
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import gradients, masters, micro_batches, real_model

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}


def small_model(
    *, model_type: str = "llama", layers: int = 3, dtype: torch.dtype = torch.float32, attention: str = "eager", **changes: Any
) -> Any:
    config = tiny_config(BY_TYPE[model_type], **{**SIZES, "num_hidden_layers": layers, **changes})
    return real_model(config, dtype=dtype, attention=attention)


def state(engine: Engine) -> dict[str, Tensor]:
    """Masters and moments, settled: everything that a step leaves behind."""
    everything = {f"master {name}": value for name, value in masters(engine).items()}
    for unit in engine.store.units:
        with engine.store.at_hand(unit, writes=False) as planes:
            for kind in engine.optimizer.state_planes:
                plane = planes[kind]
                kept = [entry for entry in unit.layout.entries if plane.holds(entry)]
                everything |= {f"{kind} {unit.names[e.name]}": plane.view(e).clone() for e in kept}
                if plane.spec.coded:
                    everything |= {f"{kind} exponents {unit.names[e.name]}": plane.exponents_of(e).clone() for e in kept}
    return everything


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def clipped_steps(engine: Engine, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Clipped steps of four micro-batches at changing rates: losses and norms, and the state that is left. Closes the engine."""
    seen = []
    for step in range(steps):
        report = engine.step(micro_batches(4, seed=step), lr=1e-2 / (1 + step), max_grad_norm=0.5)
        seen += [report.loss, report.grad_norm]
    left = state(engine)
    engine.close()
    return seen, left


def check_against_optimizer_alone(engine: Engine, alone: Engine, model: Any, rates: Sequence[float], *, limit: float) -> None:
    """Clipped steps of ``engine`` leave the bits of ``model``'s own autograd and ``Optimizer.step`` over the planes of ``alone``,
    unit after unit. Closes both."""
    for step, lr in enumerate(rates):
        batches = micro_batches(2, seed=step)
        report = engine.step(batches, WholeRows(), lr=lr, max_grad_norm=limit)
        loss, expected = loss_and_gradients(model, batches)
        assert report.loss == loss.item() and report.grad_norm > limit
        scale = clip_coefficient(report.grad_norm, limit)
        for unit in alone.store.units:
            for entry in unit.layout.entries:
                alone.store.plane(unit, GRAD).view(entry).copy_(expected[unit.names[entry.name]])
            hyper = StepHyper(lr=lr, step=step + 1, grad_scale=scale, stream=unit.stream)
            alone.optimizer.step(alone.store.planes(unit), unit.layout, hyper, 1)
        load_weights(model, alone)
    assert same(state(engine), state(alone))
    engine.close()
    alone.close()


def load_weights(model: Any, engine: Engine) -> None:
    """Into ``model``: the weights that the device would compute with."""
    values = {u.names[e.name]: engine.store.parameter(u, e) for u in engine.store.units for e in u.layout.entries}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name].to(parameter.dtype))


def check_parts_in_waves_and_on_arrival(
    make: Callable[[Plan], Engine], plan: Plan, batches_of: Callable[[int], Sequence[MicroBatch]], *, host_inputs: int
) -> None:
    """Of the engines that ``make`` builds, whose ``plan`` has ``expert_parts``, one wave and few slots: the same losses, norms
    and state with fp32 sums carried @host through three waves, and updated on arrival, inputs kept @host or not."""

    def taken(changed: Plan) -> tuple[list[float], dict[str, Tensor]]:
        engine, seen = make(changed), []
        for step in range(2):
            report = engine.step(batches_of(step), lr=1e-3, max_grad_norm=0.0)
            seen += [report.loss, report.grad_norm]
        left = state(engine)
        engine.close()
        return seen, left

    carried, at_host = {"num_waves": 3}, {"host_inputs": host_inputs}
    changes: dict[bool, list[dict[str, Any]]] = {
        True: [carried, {**carried, **at_host, "num_slots": 1}],
        False: [{"on_arrival": True, **at_host}, {"on_arrival": True, **carried, "resident_gradients": True}],
    }
    for wide, others in changes.items():
        one_wave = replace(plan, carry_fp32=wide)
        seen, left = taken(one_wave)
        for other in others:
            reports, remaining = taken(replace(one_wave, **other))
            assert reports == seen and same(remaining, left), other


def check_parts_in_rounded_waves(make: Callable[[Plan], Engine], plan: Plan, batches: Sequence[MicroBatch]) -> None:
    """The same with sums that are carried in bf16: gradients as near as their roundings."""
    found = []
    for changed in (plan, replace(plan, num_waves=3)):
        engine = make(changed)
        engine.step(batches, lr=0.0)
        found.append(gradients(engine))
        engine.close()
    assert not same(*found)
    for name, expected in found[0].items():
        # four roundings by 2**-9, of sums that are about as long as the last at most; a wave that is lost is a third
        assert float((found[1][name] - expected).norm()) < 2.0**-6 * float(expected.norm()), name
