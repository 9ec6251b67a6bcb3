"""One flipped bit in any plane between two steps is found; without one nothing changes."""

from __future__ import annotations

import pytest

from layerferry.errors import LayerFerryError
from layerferry.layout import GRAD, RESIDUE, WEIGHT
from layerferry.optim.adamw import AdamW
from layerferry.optim.verified import VerifiedOptimizer
from tests.checkpoint.tiny import assert_same, engine_of, model_of, state_of, train


@pytest.mark.parametrize("kind", [WEIGHT, RESIDUE, "exp_avg", "exp_avg_sq"])
def test_a_flipped_bit_is_found(kind: str) -> None:
    engine = engine_of(model_of())
    engine.deferred._optimizer = VerifiedOptimizer(AdamW())
    train(engine, range(2))
    engine.settle()
    buffer = engine.store.plane(engine.store.units[1], kind).buffer
    buffer[len(buffer) // 2] ^= 0x01
    with pytest.raises(LayerFerryError, match=f"verify_memory: plane {kind} of the unit with .* changed between steps 2 and 3"):
        train(engine, range(2, 4))
        engine.settle()


def test_gradients_may_change_and_nothing_else_is_touched() -> None:
    plain, watched = engine_of(model_of()), engine_of(model_of())
    watched.deferred._optimizer = VerifiedOptimizer(AdamW())
    expected = train(plain, range(3))
    found = train(watched, range(2))
    watched.settle()
    watched.store.plane(watched.store.units[0], GRAD).buffer.zero_()
    assert found + train(watched, range(2, 3)) == expected
    assert_same(state_of(watched), state_of(plain))
