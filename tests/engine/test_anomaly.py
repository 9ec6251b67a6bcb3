"""The first unit that is not finite is named, wherever the fault sits; without a fault nothing changes."""

from __future__ import annotations

from typing import Any

import pytest

from layerferry.engine import tape
from layerferry.engine.anomaly import NonFinite, WatchfulTape
from layerferry.engine.engine import Engine
from layerferry.layout import WEIGHT
from tests.checkpoint.tiny import assert_same, engine_of, model_of, state_of, train


def watchful(broken: str | None = None, value: float = float("nan")) -> Engine:
    """An engine whose parameter ``broken`` has a bad value."""
    engine = engine_of(model_of())
    engine.tape_type = WatchfulTape
    for unit in engine.store.units:
        for entry in unit.layout.entries:
            if unit.names[entry.name] == broken:
                engine.store.plane(unit, WEIGHT).view(entry).view(-1)[0] = value
    return engine


@pytest.mark.parametrize(
    ("parameter", "named"),
    [
        ("model.layers.0.mlp.down_proj.weight", "the output of layers.0"),
        ("model.layers.1.self_attn.v_proj.weight", "the output of layers.1"),
        ("model.norm.weight", "the gradient of the output of layers.1 (it comes from the head)"),
    ],
)
def test_the_first_unit_is_named(parameter: str, named: str) -> None:
    engine = watchful(parameter)
    with pytest.raises(NonFinite) as caught:
        train(engine, range(1))
    assert str(caught.value).startswith(f"{named} is not finite: ") and "micro-batch 0" in str(caught.value)


def test_a_gradient_that_overflows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is finite; the gradient of one parameter is not."""
    engine = watchful()
    real = tape.gradients_of

    def gradients_of(*arguments: Any) -> list[Any]:
        found = real(*arguments)
        found[3] = found[3] * float("inf")
        return found

    monkeypatch.setattr(tape, "gradients_of", gradients_of)
    with pytest.raises(NonFinite, match=r"the gradient of model\.layers\.1\..* is not finite"):
        train(engine, range(1))


def test_looking_changes_nothing() -> None:
    plain, looked = engine_of(model_of()), watchful()
    assert train(plain, range(2)) == train(looked, range(2))
    assert_same(state_of(looked), state_of(plain))
