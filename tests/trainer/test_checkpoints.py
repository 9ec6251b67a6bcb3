"""Checkpoints: whole or absent, rotated among this run's own, and a full disk does not end the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from layerferry.errors import LayerFerryError
from layerferry.trainer.checkpoints import Checkpoints, save_model
from tests.trainer.fakes import FakeEngine, make_config, make_loop


def folders(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


def test_a_checkpoint_is_a_model_and_its_state(tmp_path: Path) -> None:
    engine = FakeEngine([])
    loop = make_loop(make_config(tmp_path), engine)
    loop.history.add({"loss": 1.0}, step=3, epoch=0.5)
    Checkpoints(tmp_path, None).save(3, engine, None, loop.history)
    assert folders(tmp_path / "checkpoint-3") == ["config.json", "model.safetensors", "trainer_state.json"]
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3
    assert [name for name, _ in engine.calls] == ["settle", "save"]


def test_rotation_keeps_the_newest_and_other_runs(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-900").mkdir()
    engine = FakeEngine([])
    history = make_loop(make_config(tmp_path), engine).history
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, engine, None, history)
    assert folders(tmp_path) == ["checkpoint-3", "checkpoint-4", "checkpoint-900"]


def test_a_full_disk_leaves_earlier_checkpoints_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine([])
    history = make_loop(make_config(tmp_path), engine).history
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, engine, None, history)
    engine.saves_fail = True
    with caplog.at_level(logging.ERROR, "layerferry"):
        checkpoints.save(2, engine, None, history)
    assert folders(tmp_path) == ["checkpoint-1"]
    assert "checkpoint-2 could not be saved (No space left on device); training goes on" in caplog.text


def test_the_last_save_fails_loudly_and_whole(tmp_path: Path) -> None:
    with pytest.raises(LayerFerryError, match="No space left on device"):
        save_model(tmp_path, FakeEngine([], saves_fail=True), None)
    assert folders(tmp_path) == []
