"""Curves: which files appear, and the smoothing against its formula worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from layerferry.trainer.output import OutputFolder
from layerferry.trainer.plots import plot_history, smooth

PNG = b"\x89PNG\r\n\x1a\n"


def test_smoothing_formula() -> None:
    values = [4.0, 2.0, 3.0]
    weight = 1.8 * (1 / (1 + math.exp(-0.15)) - 0.5)
    second = weight * 4.0 + (1 - weight) * 2.0
    assert smooth(values) == pytest.approx([4.0, second, weight * second + (1 - weight) * 3.0], rel=1e-12)


def test_a_file_for_each_loss(tmp_path: Path) -> None:
    entries = [{"step": s, "epoch": s / 4, "loss": 3.0 / s} for s in range(1, 5)]
    entries += [{"step": 2, "epoch": 0.5, "eval_loss": 2.0, "eval_runtime": 1.0}, {"step": 2, "epoch": 0.5, "eval_a/b_loss": 2.0}]
    drawn = plot_history(entries, OutputFolder(tmp_path), title="run")
    assert sorted(drawn) == sorted(path.name for path in tmp_path.iterdir())
    assert sorted(drawn) == ["training_eval_a_b_loss.png", "training_eval_loss.png", "training_loss.png"]
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in drawn)


def test_points_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    entries = [{"step": 1, "epoch": 0.5, "loss": math.nan}, {"step": 2, "epoch": 1.0, "loss": 1.0}]
    assert len(plot_history(entries, OutputFolder(tmp_path), title="run")) == 1
    assert plot_history(entries[:1], OutputFolder(tmp_path), title="run") == []
