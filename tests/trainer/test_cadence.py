"""Hugging Face's rules for what is due when: every case is written out by hand."""

from __future__ import annotations

import pytest

from layerferry.config import TrainConfig
from layerferry.errors import ConfigError
from layerferry.trainer.cadence import Cadence, interval


def due_steps(config: TrainConfig, total: int, what: str, epoch_steps: int = 4) -> list[int]:
    cadence = Cadence.of(config, total, has_eval_rows=True)
    return [s for s in range(1, total + 1) if getattr(cadence.after(s, ends_epoch=s % epoch_steps == 0), what)]


@pytest.mark.parametrize(
    ("value", "total", "steps"), [(5, 100, 5), (0.25, 10, 3), (0.5, 10, 5), (1, 7, 1), (0, 7, 0), (0.001, 7, 1)]
)
def test_interval(value: float, total: int, steps: int) -> None:
    assert interval("save_steps", value, total) == steps


def test_interval_refuses_what_is_neither() -> None:
    with pytest.raises(ConfigError, match="eval_steps: 2.5 is neither"):
        interval("eval_steps", 2.5, 10)
    with pytest.raises(ConfigError, match="negative"):
        interval("eval_steps", -1, 10)


def test_logging() -> None:
    assert due_steps(TrainConfig(logging_steps=3), 10, "log") == [3, 6, 9]
    assert due_steps(TrainConfig(logging_steps=3, logging_first_step=True), 10, "log") == [1, 3, 6, 9]
    with pytest.raises(ConfigError, match="logging_steps: 0"):
        Cadence.of(TrainConfig(logging_steps=0), 10, has_eval_rows=False)


def test_saving() -> None:
    assert due_steps(TrainConfig(save_steps=4), 10, "save") == [4, 8, 10]
    assert due_steps(TrainConfig(save_steps=0), 10, "save") == [10]
    assert due_steps(TrainConfig(save_strategy="no", save_steps=4), 10, "save") == []
    assert due_steps(TrainConfig(save_strategy="epoch"), 10, "save") == [4, 8, 10]


def test_evaluation() -> None:
    assert due_steps(TrainConfig(eval_strategy="steps", eval_steps=0.3), 10, "evaluate") == [3, 6, 9, 10]
    assert due_steps(TrainConfig(eval_strategy="steps", logging_steps=5), 10, "evaluate") == [5, 10]
    assert due_steps(TrainConfig(eval_strategy="epoch"), 8, "evaluate") == [4, 8]
    assert due_steps(TrainConfig(), 8, "evaluate") == []
    with pytest.raises(ConfigError, match="val_size or eval_dataset"):
        Cadence.of(TrainConfig(eval_strategy="steps"), 10, has_eval_rows=False)
