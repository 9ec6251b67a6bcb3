"""The first unit that is not finite is named, wherever the fault sits; without a fault nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.engine import tape
from layerferry.engine.anomaly import NonFinite, WatchfulTape, check_norms
from layerferry.engine.engine import Engine
from layerferry.errors import LayerFerryError
from layerferry.layout import WEIGHT
from layerferry.trainer import train as train_run
from tests.checkpoint.tiny import assert_same, engine_of, model_of, state_of, train
from tests.reliability.runs import make_config, prepare


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
        ("model.layers.0.mlp.down_proj.weight", "the output of layer.0"),
        ("model.layers.1.self_attn.v_proj.weight", "the output of layer.1"),
        ("model.norm.weight", "the gradient of the output of layer.1 (it comes from the head)"),
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


@pytest.mark.parametrize("place", ["prologue", "epilogue"])
def test_the_ends_are_named_by_their_norms(place: str) -> None:
    engine = engine_of(model_of())
    train(engine, range(1))
    unit = engine.skeleton.prologue_unit if place == "prologue" else engine.skeleton.epilogue_unit
    engine.drain.norms[unit.index] = torch.tensor(float("inf"))
    with pytest.raises(NonFinite, match=f"the gradient of {unit.name} is not finite: its norm is inf"):
        check_norms(engine, 1.0)


def test_through_the_front_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are named, and no plane was touched."""
    base = prepare(tmp_path)
    real = tape.Tape.forward

    def forward(self: tape.Tape, unit: Any, micro_batch: int, template: Any, hidden: Any, call: Any) -> Any:
        return real(self, unit, micro_batch, template, hidden, call) * (float("nan") if unit.name == "layer.1" else 1.0)

    monkeypatch.setattr(tape.Tape, "forward", forward)
    with pytest.raises(LayerFerryError, match=r"detect_anomaly: the output of layer.1 is not finite: .*; rows \d+, \d+$"):
        train_run(make_config(base, tmp_path / "out", max_steps=2, detect_anomaly=True))
