"""One flipped bit in any plane between two steps is found; without one nothing changes."""

from __future__ import annotations

import pytest

from layerferry.engine.engine import Engine
from layerferry.engine.stages import stages_of
from layerferry.errors import LayerFerryError
from layerferry.layout import GRAD, RESIDUE, WEIGHT
from layerferry.optim.verified import verified
from tests.checkpoint.tiny import assert_same, engine_of, model_of, state_of, train


def watch(engine: Engine) -> None:
    engine.deferred.stages = stages_of(engine.store, verified(engine.optimizer), engine.backend, engine.clock, threads=1)


@pytest.mark.parametrize("kind", [WEIGHT, RESIDUE, "exp_avg", "exp_avg_sq"])
def test_a_flipped_bit_is_found(kind: str) -> None:
    engine = engine_of(model_of())
    watch(engine)
    train(engine, range(2))
    engine.settle()
    buffer = engine.store.plane(engine.store.units[1], kind).buffer
    buffer[len(buffer) // 2] ^= 0x01
    with pytest.raises(LayerFerryError, match=f"verify_memory: plane {kind} of the unit with .* changed between steps 2 and 3"):
        train(engine, range(2, 4))
        engine.settle()


def test_gradients_may_change_and_nothing_else_is_touched() -> None:
    plain, watched = engine_of(model_of()), engine_of(model_of())
    watch(watched)
    expected = train(plain, range(3))
    found = train(watched, range(2))
    watched.settle()
    watched.store.plane(watched.store.units[0], GRAD).buffer.zero_()
    assert found + train(watched, range(2, 3)) == expected
    assert_same(state_of(watched), state_of(plain))
