"""A change of plan between two steps changes no bit, also behind a step that has failed half-way."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from layerferry.engine.engine import Engine
from layerferry.plan import Plan
from tests.checkpoint.tiny import assert_same, engine_of, model_of, state_of, train


def test_bits_do_not_change() -> None:
    model = model_of()
    plain = engine_of(model)
    expected = train(plain, range(4))
    engine = engine_of(model)
    found = train(engine, range(2))
    engine.replan(Plan(num_slots=3, num_slabs=2, activation_budget=0.0))
    assert found + train(engine, range(2, 4)) == expected
    assert_same(state_of(engine), state_of(plain))


def test_behind_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    expected = train(engine_of(model), range(4))
    engine = engine_of(model)
    found = train(engine, range(2))

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Engine, "_read", full)
        train(engine, range(2, 3))
    engine.replan(Plan(num_slots=2, num_slabs=1))
    assert found + train(engine, range(2, 4)) == expected


def test_old_buffers_are_free_before_new_ones_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model_of())
    train(engine, range(1))
    old = [weakref.ref(slot) for slot in engine._slots]
    seen: list[int] = []
    real = engine._allocate

    def allocate(plan: Plan) -> None:
        gc.collect()
        seen.append(sum(ref() is not None for ref in old))
        real(plan)

    monkeypatch.setattr(engine, "_allocate", allocate)
    engine.replan(Plan(num_slots=2, num_slabs=1))
    assert seen == [0]


def test_progress_can_be_read_while_buffers_are_exchanged() -> None:
    engine = engine_of(model_of())
    train(engine, range(1))
    assert engine.moved_bytes > 0
    feed = engine.feed
    del engine.feed  # as ``replan`` does for a moment
    assert engine.moved_bytes == 0
    engine.feed = feed
    engine.close()
