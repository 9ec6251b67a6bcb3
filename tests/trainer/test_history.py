"""The files of a run: keys and types are those of a real LLaMA-Factory 0.9.5 run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerferry.config import TrainConfig
from layerferry.trainer.cadence import Cadence
from layerferry.trainer.history import History, clock_time
from layerferry.trainer.output import OutputFolder
from tests.trainer.fakes import read_lines


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_history(folder: Path, clock: Clock, **train: object) -> History:
    config = TrainConfig(output_dir=str(folder), **train)  # type: ignore[arg-type]
    return History(config, Cadence.of(config, 4, has_eval_rows=False), OutputFolder(folder), clock=clock)


def test_log_line_is_llama_factorys(tmp_path: Path) -> None:
    clock = Clock()
    history = make_history(tmp_path, clock, include_num_input_tokens_seen=True)
    clock.now += 7
    history.step_done(1)
    clock.now += 3.7
    history.step_done(2)
    history.tokens_seen = 704
    history.add({"loss": 2.587, "grad_norm": 3.5, "learning_rate": 1e-05}, step=2, epoch=0.4)
    assert read_lines(tmp_path / "trainer_log.jsonl") == [
        {
            "current_steps": 2,
            "total_steps": 4,
            "loss": 2.587,
            "lr": 1e-05,
            "epoch": 0.4,
            "percentage": 50.0,
            "elapsed_time": "0:00:10",
            "remaining_time": "0:00:07",
            "throughput": 65.79,
            "total_tokens": 704,
        }
    ]


def test_remaining_time_forgets_the_first_step(tmp_path: Path) -> None:
    clock = Clock()
    history = make_history(tmp_path, clock)
    for seconds in (1000, 5, 7, 9):
        clock.now += seconds
        step = len(history.entries) + 1
        history.step_done(step)
        history.add({"loss": 1.0}, step=step, epoch=0.1)
    times = [line["remaining_time"] for line in read_lines(tmp_path / "trainer_log.jsonl")]
    assert times == ["", "0:00:10", "0:00:06", "0:00:00"]


def test_eval_line_and_no_tokens_unless_asked(tmp_path: Path) -> None:
    history = make_history(tmp_path, Clock())
    history.add({"eval_loss": 1.5, "eval_runtime": 2.0, "eval_code_loss": 3.0}, step=1, epoch=0.2)
    [line] = read_lines(tmp_path / "trainer_log.jsonl")
    assert list(line) == [
        "current_steps",
        "total_steps",
        "eval_loss",
        "eval_code_loss",
        "epoch",
        "percentage",
        "elapsed_time",
        "remaining_time",
    ]


def test_lines_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    history = make_history(tmp_path, Clock())
    for step in (1, 2, 3):
        history.add({"loss": 1.0}, step=step, epoch=0.1)
        assert len(read_lines(tmp_path / "trainer_log.jsonl")) == step


def test_state_is_what_transformers_reads(tmp_path: Path) -> None:
    from transformers import TrainerState

    history = make_history(tmp_path, Clock(), logging_steps=1, num_train_epochs=2.5)
    history.add({"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.0}, step=1, epoch=0.5)
    history.step_done(2)  # nothing is logged there
    history.epoch = 1.0
    history.write_state()
    state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (state.global_step, state.epoch, state.max_steps, state.num_train_epochs) == (2, 1.0, 4, 3)
    assert state.log_history == [{"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.0, "epoch": 0.5, "step": 1}]


def test_results_are_merged(tmp_path: Path) -> None:
    history = make_history(tmp_path, Clock())
    history.write_results("train", {"train_loss": 1.0, "epoch": 1.0})
    history.write_results("eval", {"eval_loss": 2.0, "epoch": 1.0})
    assert json.loads((tmp_path / "train_results.json").read_text()) == {"train_loss": 1.0, "epoch": 1.0}
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 2.0, "epoch": 1.0}
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"train_loss": 1.0, "eval_loss": 2.0, "epoch": 1.0}


def test_the_log_is_not_written_through_a_link_that_has_come_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    history = make_history(tmp_path, Clock())
    (tmp_path / "trainer_log.jsonl").symlink_to(precious)
    history.add({"loss": 1.0}, step=1, epoch=0.1)
    assert precious.read_text() == "precious" and "trainer_log.jsonl cannot be written" in caplog.text
    (tmp_path / "trainer_log.jsonl").unlink()
    history.add({"loss": 1.0}, step=2, epoch=0.2)
    assert [line["current_steps"] for line in read_lines(tmp_path / "trainer_log.jsonl")] == [1, 2]
    history.step_done(2)
    (tmp_path / "trainer_state.json").symlink_to(precious)
    history.write_state()
    assert precious.read_text() == "precious" and json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 2


def test_a_log_that_is_begun_anew_leaves_its_other_names_alone(tmp_path: Path) -> None:
    """A backup of hard links keeps what it had."""
    history = make_history(tmp_path, Clock())
    history.add({"loss": 1.0}, step=1, epoch=0.1)
    (tmp_path / "backup").hardlink_to(tmp_path / "trainer_log.jsonl")
    history.take_up([], [], tokens_seen=0, total_flops=0.0)
    assert len(read_lines(tmp_path / "backup")) == 1 and not read_lines(tmp_path / "trainer_log.jsonl")


def test_clock_time() -> None:
    assert clock_time(3723.9) == "1:02:03"
