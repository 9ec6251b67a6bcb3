"""Trackers: found or refused before anything slow, and given Hugging Face's metric names. The packages are stood in for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from layerferry.checkpoint.lock import FolderLock, LockedFiles
from layerferry.errors import ConfigError
from layerferry.trainer import reporters
from layerferry.trainer.output import OutputFolder
from layerferry.trainer.reporters import Minded, open_reporters, tracker_metrics, tracker_names
from tests.trainer.fakes import make_config

ENTRY = {"loss": 1.5, "learning_rate": 0.1, "step": 3, "epoch": 0.5}


def test_names() -> None:
    assert tracker_names(()) == tracker_names(("none",)) == []
    with pytest.raises(ConfigError, match="report_to: mlflow is not supported; use tensorboard, wandb or none"):
        tracker_names(("mlflow",))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporters, "_is_installed", lambda package: package == "wandb")
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        tracker_names(("wandb", "tensorboard"))
    assert tracker_names(("all",)) == ["wandb"]


def test_metric_names() -> None:
    entry = {"loss": 1.0, "eval_loss": 2.0, "eval_a_loss": 3.0, "step": 1, "epoch": 0.1}
    assert tracker_metrics(entry) == {"train/loss": 1.0, "eval/loss": 2.0, "eval/a_loss": 3.0}


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[tuple[str, float, int]] = []
    made: list[str] = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            made.append(log_dir)

        def add_text(self, name: str, text: str) -> None:
            assert "base" in text

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None: ...

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    for train in ({}, {"logging_dir": str(tmp_path / "logs"), "run_name": "one"}):
        [reporter] = open_reporters(["tensorboard"], make_config(tmp_path, **train), OutputFolder(tmp_path))
        reporter.report(ENTRY)
        reporter.close()
    assert made == [str(tmp_path / "runs"), str(tmp_path / "logs" / "one")]
    assert scalars[:2] == [("train/loss", 1.5, 3), ("train/learning_rate", 0.1, 3)]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda metrics: calls.append(metrics), finish=lambda: calls.append("finished"))
    module = ModuleType("wandb")
    module.init = lambda **given: (calls.append(given), run)[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    [reporter] = open_reporters(["wandb"], make_config(tmp_path, run_name="mine"), OutputFolder(tmp_path))
    reporter.report(ENTRY)
    reporter.close()
    assert calls[0]["name"] == "mine" and calls[0]["config"]["data"]["dataset"] == ["rows"]
    assert calls[1] == {"train/loss": 1.5, "train/learning_rate": 0.1, "train/global_step": 3, "train/epoch": 0.5}
    assert calls[2] == "finished"


def test_a_tracker_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**given: Any) -> None:
        raise RuntimeError("no key:\nlog in")

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigError, match="^report_to: wandb does not start: RuntimeError: no key: log in; report_to: none goes"):
        open_reporters(["wandb"], make_config(tmp_path), OutputFolder(tmp_path))


class Tracker:
    """Takes entries, unless ``fault`` is set."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.taken: list[Any] = []

    def report(self, entry: Any) -> None:
        if self.fault is not None:
            raise self.fault
        self.taken.append(entry)

    def close(self) -> None:
        self.report("closed")


def test_a_tracker_that_fails_costs_its_entries_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker()
    minded = Minded("wandb", tracker, lambda: None)
    for fault in (None, ValueError("gone"), OSError(28, "full"), None):
        tracker.fault = fault
        minded.report(ENTRY)
    minded.close()
    assert tracker.taken == [ENTRY, ENTRY, "closed"]
    assert [record.getMessage() for record in caplog.records] == [
        "report_to: wandb does not take the entries: ValueError: gone; training goes on"
    ]


def test_a_tracker_is_asked_nothing_in_the_folder_of_a_successor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker, folder = Tracker(), tmp_path / "out"
    with FolderLock(folder) as lock:
        minded = Minded("tensorboard", tracker, LockedFiles(lock).check)
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        minded.report(ENTRY)
        folder.rmdir()
        (tmp_path / "moved").rename(folder)
        minded.report("later")  # type: ignore[arg-type]
    assert tracker.taken == ["later"] and "FolderMoved" in caplog.text
