"""A change of plan between two steps changes no bit, also behind a step that has failed half-way."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch

from layerferry.backends.base import Lane
from layerferry.backends.cpu import CpuBackend, HostMark
from layerferry.engine.engine import Engine
from layerferry.engine.sweep import Sweep
from layerferry.plan import Plan
from tests.checkpoint.tiny import LR, assert_same, batch_of, engine_of, model_of, state_of, train


def full(*arguments: object) -> None:
    raise torch.OutOfMemoryError("full")


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

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Engine, "_read", full)
        train(engine, range(2, 3))
    engine.replan(Plan(num_slots=2, num_slabs=1))
    assert found + train(engine, range(2, 4)) == expected


class Counting(CpuBackend):
    """Its clock goes on by a second with every look."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = itertools.count()

    def mark(self, lane: Lane) -> HostMark:
        return HostMark(float(next(self._looks)))


def test_a_step_has_not_waited_for_one_that_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for an evaluation that did."""
    engine = engine_of(model_of(), Plan(num_slots=2, num_slabs=1, on_device=(0, 1, 2, 3)), backend=Counting())
    expected = engine.step(batch_of(0), lr=LR).exposed_link_s
    assert expected > 0

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_read", full)
        patch.setattr(Sweep, "_losses", full)
        for broken in (lambda: engine.step(batch_of(1), lr=LR), lambda: engine.evaluate(batch_of(1))):
            with pytest.raises(torch.OutOfMemoryError):
                broken()
    assert engine.step(batch_of(1), lr=LR).exposed_link_s == expected
    engine.close()


def test_buffers_that_find_no_room_may_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a smaller plan, with the weights as they were."""
    model = model_of()
    expected = train(engine_of(model), range(4))
    engine = engine_of(model)
    found = train(engine, range(2))

    for part in ("Feed", "Drain", "KeptInputs"):
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(f"layerferry.engine.engine.{part}", full)
            engine.replan(Plan(num_slots=3, num_slabs=2))
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
