"""Uploads: how many, in which order, and what a slot holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerferry.backends.chaos import is_released
from layerferry.engine.engine import Engine
from layerferry.layout import WEIGHT
from layerferry.plan import Plan
from tests.conformance.harness import make_engine, micro_batches
from tests.engine.small import small_model


def engine_of(layers: int, num_slots: int, **changes: Any) -> Engine:
    return make_engine(small_model(layers=layers, **changes), Plan(fp32=True, num_slots=num_slots, num_slabs=1))


def layer_uploads(engine: Engine, uses_of_ends: int = 2) -> float:
    """Uploads of layers since the start, from the bytes that travelled."""
    sizes = {unit.is_layer: unit.layout.bytes(engine.store.specs[WEIGHT]) for unit in engine.store.units}
    ends = sum(u.layout.bytes(engine.store.specs[WEIGHT]) for u in engine.store.units if not u.is_layer)
    return (engine.feed.uploaded_bytes - ends * uses_of_ends / 2) / sizes[True]


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 6, 8])
def test_a_step_uploads_as_few_as_can_be(layers: int, num_slots: int) -> None:
    """L on the way up; on the way down all but the S that are still there: 2L - min(S, L), in the second step too, for the
    weights have changed. No schedule does with less: the last S are all that S slots can hold at the turn."""
    engine = engine_of(layers, num_slots)
    engine.step(micro_batches(2), lr=0.0)
    engine.settle()
    least = 2 * layers - min(num_slots, layers)
    assert layer_uploads(engine) == least
    engine.step(micro_batches(2), lr=0.0)
    engine.settle()
    assert layer_uploads(engine, uses_of_ends=4) == 2 * least
    engine.close()


def test_resident_weights_are_not_uploaded_again_for_evaluation() -> None:
    engine = engine_of(3, 3)
    engine.evaluate(micro_batches(1))
    assert layer_uploads(engine) == 3
    engine.evaluate(micro_batches(1))
    assert layer_uploads(engine, uses_of_ends=4) == 3
    engine.close()


def test_a_slot_holds_the_bytes_of_its_unit() -> None:
    engine = engine_of(3, 2)
    layers = engine.skeleton.layer_units
    engine.feed.expect(layers)
    for unit in layers:
        with engine.feed(unit) as slot:
            own = engine.store.plane(unit, WEIGHT).buffer
            assert slot.piece is unit and torch.equal(slot.buffer[: own.numel()], own)
    engine.close()


def test_units_that_nobody_announced_are_fed_all_the_same() -> None:
    engine = engine_of(4, 2)
    layers = engine.skeleton.layer_units
    engine.feed.expect(layers)
    for unit in (layers[3], layers[0], layers[0], layers[2]):
        with engine.feed(unit) as slot:
            own = engine.store.plane(unit, WEIGHT).buffer
            assert torch.equal(slot.buffer[: own.numel()], own)
    engine.close()


def test_what_is_in_use_is_never_evicted() -> None:
    engine = engine_of(4, 2)
    first, second, third, _ = engine.skeleton.layer_units
    engine.feed.expect([first, second, third])
    with engine.feed(first) as slot:
        own = engine.store.plane(first, WEIGHT).buffer
        assert torch.equal(slot.buffer[: own.numel()], own)
        assert slot.claims == 1
    with engine.feed(second), engine.feed(third) as reused:
        assert reused is slot  # only now
    engine.close()


def test_forgetting_stale_weights_empties_the_slots() -> None:
    engine = engine_of(2, 2)
    unit = engine.skeleton.layer_units[0]
    with engine.feed(unit) as slot:
        pass
    engine.feed.forget(stale=False)
    assert slot.piece is unit and slot.claims == 0
    engine.feed.forget(stale=True)
    assert slot.piece is None and is_released(slot.buffer.view(torch.float32))
    engine.close()


def test_a_slot_is_given_back_when_its_user_fails() -> None:
    engine = engine_of(2, 1)
    first, second = engine.skeleton.layer_units
    with pytest.raises(ZeroDivisionError), engine.feed(first):
        raise ZeroDivisionError
    with engine.feed(second) as slot:
        assert slot.piece is second
    engine.close()
