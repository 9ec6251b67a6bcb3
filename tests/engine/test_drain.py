"""Gradients on their way to the host."""

from __future__ import annotations

import pytest
import torch

from layerferry.backends.chaos import ChaosBackend
from layerferry.engine import drain as drain_module
from layerferry.engine.engine import Engine
from layerferry.layout import GRAD
from layerferry.objectives import OnHidden, OnLogits
from layerferry.plan import Plan
from tests.conformance.harness import gradients, make_engine, micro_batches
from tests.engine.small import clipped_steps, same, small_model, state


def engine_of(*, fp32: bool = True, num_slabs: int = 1, num_waves: int = 1, carry_fp32: bool = False) -> Engine:
    plan = Plan(fp32=fp32, num_slots=2, num_slabs=num_slabs, num_waves=num_waves, carry_fp32=carry_fp32)
    return make_engine(small_model(dtype=torch.float32 if fp32 else torch.bfloat16), plan)


def drain(engine: Engine, value: float, *, carry: bool = False) -> torch.Tensor:
    """Add ``value`` to the first layer's gradient; what is then @host."""
    unit = engine.skeleton.layer_units[0]
    if carry:
        engine.drain.expect([unit])
    with engine.drain(unit, carry=carry) as accumulator:
        for view in accumulator.views():
            view.add_(value)
    engine.backend.synchronize()
    return torch.cat([engine.store.plane(unit, GRAD).view(entry).flatten() for entry in unit.layout.entries])


def test_the_accumulator_starts_at_zero_every_time() -> None:
    engine = engine_of()
    for value in (3.0, 5.0):
        assert bool((drain(engine, value) == value).all())
    engine.close()


def test_carry_starts_from_what_is_at_home() -> None:
    engine = engine_of(num_waves=2)
    drain(engine, 3.0)
    assert bool((drain(engine, 5.0, carry=True) == 8.0).all())
    engine.close()


def test_a_bf16_gradient_is_rounded_once_and_its_norm_is_that_of_the_rounded_bytes() -> None:
    engine = engine_of(fp32=False)
    value = 1.0 + 2.0**-9  # between two bf16 numbers: to even, 1.0
    assert bool((drain(engine, value).float() == 1.0).all())
    unit = engine.skeleton.layer_units[0]
    assert float(engine.drain.norms[unit.index]) == pytest.approx(unit.numel**0.5, rel=1e-6)
    engine.close()


def test_padding_travels_as_zeros() -> None:
    engine = engine_of()
    drain(engine, 1.0)
    unit = engine.skeleton.layer_units[0]
    plane = engine.store.plane(unit, GRAD)
    assert sum(float(section.sum()) for section in plane.tensors()) == unit.numel
    engine.close()


def test_a_parameter_without_gradient_sends_zeros() -> None:
    """A loss on hidden states leaves the final norm and the head without gradient, after a step that gave them one."""
    engine = engine_of()
    engine.step(micro_batches(2), lr=0.0)
    assert gradients(engine)["lm_head.weight"].any()
    engine.step(micro_batches(2), OnHidden(lambda hidden, batch: hidden.square().mean()), lr=0.0)
    found = gradients(engine)
    assert not found["lm_head.weight"].any() and not found["model.norm.weight"].any()
    assert found["model.layers.0.mlp.up_proj.weight"].any()
    engine.close()


@pytest.mark.parametrize("num_slabs", [1, 2, 3])
def test_slabs_in_flight_are_not_overwritten(num_slabs: int) -> None:
    engine = engine_of(num_slabs=num_slabs)
    units = engine.skeleton.layer_units
    for number, unit in enumerate(units):
        with engine.drain(unit) as accumulator:
            for view in accumulator.views():
                view.fill_(1.0 + number)
    engine.backend.synchronize()
    for number, unit in enumerate(units):
        assert all(bool((view == 1.0 + number).all()) for view in engine.store.plane(unit, GRAD).views())
    engine.close()


def test_norms_are_torchs() -> None:
    engine = engine_of()
    engine.step(micro_batches(2), lr=0.0)
    found = gradients(engine)
    for unit in engine.store.units:
        exact = torch.cat([found[name].flatten() for name in unit.names.values()]).double().norm().item()
        assert abs(float(engine.drain.norms[unit.index]) - exact) <= (unit.numel / 2 + 2) * 2.0**-24 * exact
    engine.close()


def test_every_gradient_travels_once_per_wave() -> None:
    for num_waves in (1, 2):
        engine = engine_of(num_waves=num_waves)
        engine.step(micro_batches(2), lr=0.0)
        engine.settle()
        total = sum(unit.layout.bytes(engine.store.specs[GRAD]) for unit in engine.store.units)
        assert engine.drain.drained_bytes == num_waves * total
        engine.close()


@pytest.mark.parametrize("turn_layers", [0, 2])
def test_a_wave_that_broke_off_leaves_nothing_on_its_way_to_the_next_step(turn_layers: int) -> None:
    """Gradients to be carried on are being read @host when the second wave's loss fails; the next step writes there. Slots for
    all weights, so that no upload of theirs orders the two by chance."""
    model = small_model(tie_word_embeddings=True)
    plan = Plan(fp32=True, num_slots=3, num_slabs=1, num_waves=2, carry_fp32=True, turn_layers=turn_layers)
    found, divisors = [], iter((1, 0))
    failing = OnLogits(lambda logits, labels: logits.sum() / (1 // next(divisors)))
    for fails in (False, True):
        engine = make_engine(model, plan, backend=ChaosBackend(eagerness=0.0))
        if fails:
            with pytest.raises(ZeroDivisionError):
                engine.step(micro_batches(), failing, lr=1e-2)
        engine.step(micro_batches(), lr=1e-2)
        found.append(state(engine))
        engine.close()
    assert same(*found)


@pytest.mark.parametrize("carry_fp32", [False, True])
def test_what_is_at_home_is_rounded_like_what_leaves(carry_fp32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, and not at all where the host's planes are fp32: the same state after clipped steps."""
    monkeypatch.setattr(drain_module, "ROUNDED_AT_ONCE", 7)
    monkeypatch.setattr(drain_module, "NORMED_AT_ONCE", 50)
    model, found = small_model(dtype=torch.bfloat16), []
    for home in ((), (0, 1, 2), tuple(range(5))):
        plan = Plan(num_slots=2, num_slabs=1, carry_fp32=carry_fp32, on_device=home)
        found.append(clipped_steps(make_engine(model, plan), 2))
    assert found[0][0] == found[1][0] == found[2][0]
    assert same(found[0][1], found[1][1]) and same(found[0][1], found[2][1])
