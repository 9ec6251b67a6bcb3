"""The loop with an engine that only pretends: which calls it makes, in which order, and what it records."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerferry.checkpoint.files import Files
from layerferry.data import Cursor
from layerferry.engine.arrivals import taken_already
from layerferry.engine.engine import EvalReport, StepReport
from layerferry.errors import DataError, Interrupted, LayerFerryError
from layerferry.trainer import loop, run, watchdog
from layerferry.trainer.state import RunState, Totals
from tests.checkpoint.test_folders import make
from tests.trainer.fakes import FakeEngine, make_config, make_loop, read_lines


def test_steps_epochs_and_rates(tmp_path: Path) -> None:
    """7 rows in steps of 2 are 4 steps an epoch, the last one smaller; the first update runs at the schedule's value for 0."""
    engine = FakeEngine([float(i) for i in range(1, 9)])
    loop = make_loop(make_config(tmp_path, num_train_epochs=2, save_strategy="no"), engine)
    metrics = loop.run()
    assert [value for name, value in engine.calls if name == "step"] == pytest.approx([0.1 * i for i in range(8)])
    assert engine.calls[-1] == ("settle", None)
    entries = loop.history.entries
    assert [entry["epoch"] for entry in entries[:-1]] == pytest.approx([2 / 7, 4 / 7, 6 / 7, 1, 9 / 7, 11 / 7, 13 / 7, 2])
    assert [entry["loss"] for entry in entries[:-1]] == [float(i) for i in range(1, 9)]
    assert [entry["learning_rate"] for entry in entries[:-1]] == pytest.approx([0.1 * i for i in range(8)])
    assert metrics["train_loss"] == 4.5 and metrics["epoch"] == 2
    assert loop.history.tokens_seen == 2 * 7 * 4
    assert loop.history.total_flops == 2 * 7 * 4 * 104


def test_max_steps_and_accumulation(tmp_path: Path) -> None:
    engine = FakeEngine([1.0] * 3)
    loop = make_loop(make_config(tmp_path, max_steps=3, gradient_accumulation_steps=2, save_strategy="no"), engine)
    loop.run()
    assert [entry["epoch"] for entry in loop.history.entries] == pytest.approx([4 / 7, 1, 11 / 7, 11 / 7])


def test_logged_loss_is_the_mean_since_the_last_line(tmp_path: Path) -> None:
    loop = make_loop(
        make_config(tmp_path, max_steps=5, logging_steps=2, save_strategy="no"), FakeEngine([1.0, 3.0, 5.0, 9.0, 100.0])
    )
    loop.run()
    logged = [(e["step"], e["loss"], e["grad_norm"]) for e in loop.history.entries if "loss" in e]
    assert logged == [(2, 2.0, 1.5), (4, 7.0, 4.5)]


def test_a_skipped_step_advances_neither_step_nor_schedule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine([1.0, None, None, 2.0, 3.0])
    loop = make_loop(make_config(tmp_path, max_steps=3, save_strategy="no"), engine)
    with caplog.at_level(logging.WARNING, "layerferry"):
        loop.run()
    assert [value for name, value in engine.calls if name == "step"] == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.2])
    assert [(e["step"], e["loss"]) for e in loop.history.entries if "loss" in e] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert caplog.text.count("the step after step 1 was skipped") == 2


def test_an_epoch_that_ends_in_a_skipped_step_is_evaluated_and_saved(tmp_path: Path) -> None:
    """Steps of 2 of 7 rows: the fourth of each epoch ends it. The cursor that is saved stands behind the skipped rows."""
    engine = FakeEngine([1.0, 1.0, 1.0, None, 2.0, 2.0, 2.0, None, 3.0])
    config = make_config(tmp_path, max_steps=7, eval_strategy="epoch", save_strategy="epoch")
    loop = make_loop(config, engine, num_eval_rows=2)
    loop.run()
    assert [e["step"] for e in loop.history.entries if "eval_loss" in e] == [3, 6, 7]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6", "checkpoint-7"}
    state = RunState.read(tmp_path / "checkpoint-3")
    assert (state.cursor.epoch, state.cursor.position, state.totals.skipped) == (1, 0, 1)


def test_nothing_is_saved_before_the_first_step(tmp_path: Path) -> None:
    engine = FakeEngine([None, None, None, None, 1.0])
    make_loop(make_config(tmp_path, max_steps=1, save_strategy="epoch"), engine).run()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1"}


class Standing(FakeEngine):
    """Stands still in ``where``, until it is let go."""

    def __init__(self, where: str, let_go: threading.Event) -> None:
        super().__init__([1.0] * 3)
        self.where, self.let_go = where, let_go

    def _stand(self, where: str) -> None:
        if where == self.where:
            assert self.let_go.wait(30)

    def evaluate(self, micro_batches: Any, objective: Any = None) -> EvalReport:
        self._stand("evaluate")
        return super().evaluate(micro_batches, objective)

    def save_pretrained(self, folder: Path, *, tokenizer: Any = None) -> None:
        self._stand("save")
        super().save_pretrained(folder, tokenizer=tokenizer)


class Stalls:
    """Hears the watchdog in the process's stead, and lets go what stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.let_go = threading.Event()
        monkeypatch.setattr(watchdog, "end_process", self._hear)

    def _hear(self, lanes: Any, patience_s: float) -> None:
        self.names.extend(lane.name for lane in lanes)
        self.let_go.set()


@pytest.mark.parametrize(("where", "name"), [("evaluate", "device"), ("save", "model writer")])
def test_the_watchdog_sees_evaluation_and_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    stalls = Stalls(monkeypatch)
    config = make_config(tmp_path, max_steps=3, do_eval=True, save_strategy="no", watchdog_minutes=0.3 / 60)
    monkeypatch.setattr(run, "card_of", lambda loop: "")
    run.run(make_loop(config, Standing(where, stalls.let_go), num_eval_rows=2))
    assert stalls.names == [name]


def test_the_watchdog_sees_a_loader_that_the_end_of_the_run_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_for: list[str | None] = []
    run_ = make_loop(make_config(tmp_path, max_steps=2, save_strategy="no"), FakeEngine([1.0] * 2))

    class Seen(loop.Prefetch[Any]):
        def close(self) -> None:
            waits_for.append(run_.waits_for)
            super().close()

    monkeypatch.setattr(loop, "Prefetch", Seen)
    run_.run()
    assert waits_for == ["data loader"] and run_.waits_for is None


def test_the_watchdog_sees_what_is_closed_behind_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(FakeEngine):
        deferred = SimpleNamespace(num_pending=1, num_done=0)

    stalls, stack = Stalls(monkeypatch), ExitStack()
    stack.callback(stalls.let_go.wait, 30)
    with pytest.raises(DataError):
        try:
            raise DataError("what has ended the run")
        finally:
            run.close_watched(stack, make_loop(make_config(tmp_path, watchdog_minutes=0.1 / 60), Stuck([])))
    assert stalls.names == ["optimizer"] and "what has ended the run" in caplog.text


@pytest.mark.parametrize("most", [10, 0])
def test_a_run_that_only_skips_ends(tmp_path: Path, most: int) -> None:
    config = make_config(tmp_path, max_steps=3, save_strategy="no", max_skipped_steps=most)
    loop = make_loop(config, FakeEngine([1.0] + [None] * 20))
    with pytest.raises(LayerFerryError, match=f"{most + 1} steps in a row after step 1 were not finite"):
        loop.run()
    batches = json.loads((tmp_path / "skipped_batches.json").read_text())["batches"]
    order = [0, 1, 2, 3, 4, 5, 6]  # in twos, the last of an epoch alone; the first two were step 1
    expected = [order[2:4], order[4:6], order[6:], *([order[:2], order[2:4], order[4:6], order[6:]] * 3)]
    assert [batch["rows"] for batch in batches] == expected[: most + 1]
    assert all(batch["after_step"] == 1 and batch["reason"] == "loss nan, gradient norm inf" for batch in batches)


def test_skips_in_a_row_are_counted_over_a_resume(tmp_path: Path) -> None:
    """Two before the process ended, one behind it: the file names all three, as that of an uninterrupted run does."""
    config = make_config(tmp_path, max_steps=3, save_strategy="no", max_skipped_steps=2)
    first = make_loop(config, FakeEngine([1.0, None, None]))
    with pytest.raises(IndexError):
        first.run()
    state = first.state()
    again = make_loop(config, FakeEngine([None]))
    again = replace(again, cursor=state.cursor, totals=state.totals, skipped_batches=state.skipped_batches)
    with pytest.raises(LayerFerryError, match="3 steps in a row after step 1 were not finite"):
        again.run()
    batches = json.loads((tmp_path / "skipped_batches.json").read_text())["batches"]
    assert [batch["rows"] for batch in batches] == [[2, 3], [4, 5], [6]]


def test_a_spoilt_step_says_from_where_to_go_on(tmp_path: Path) -> None:
    class Spoilt(FakeEngine):
        def step(self, micro_batches: Any, objective: Any = None, *, lr: float) -> StepReport:
            if len(self.calls) == 2:
                raise taken_already(3, float("nan"), 1.0)
            return super().step(micro_batches, objective, lr=lr)

    make(tmp_path, 1)
    with pytest.raises(LayerFerryError, match=r"step 3 .* rows: 4, 5\. go on from .*: resume_from_checkpoint: .*checkpoint-1$"):
        make_loop(make_config(tmp_path, max_steps=3, save_strategy="no"), Spoilt([1.0] * 3)).run()


def test_a_signal_while_the_model_is_saved_does_not_cost_it(tmp_path: Path) -> None:
    class Signalled(FakeEngine):
        def save_pretrained(self, folder: Path, *, tokenizer: Any = None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().save_pretrained(folder, tokenizer=tokenizer)

    loop = make_loop(make_config(tmp_path, max_steps=1, save_strategy="no"), Signalled([1.0]))
    with pytest.raises(Interrupted, match="SIGTERM: all steps are taken and the model is in") as caught:
        run.run(loop)
    assert caught.value.exit_code == 143 and (tmp_path / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_signal_in_the_last_step_ends_the_run_with_the_model_and_its_records(tmp_path: Path, *, evaluates: bool) -> None:
    class Signalled(FakeEngine):
        def step(self, micro_batches: Any, objective: Any = None, *, lr: float) -> StepReport:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().step(micro_batches, objective, lr=lr)

        def evaluate(self, micro_batches: Any, objective: Any = None) -> EvalReport:
            pytest.fail("an evaluation was begun")

    config = make_config(tmp_path, max_steps=1, save_strategy="no", do_eval=evaluates)
    rest = "; the last evaluation was left out" if evaluates else ", and nothing is left to do"
    with pytest.raises(Interrupted, match=f"SIGTERM: that was the last step: the model is in {tmp_path}{rest}$") as caught:
        run.run(make_loop(config, Signalled([1.0]), num_eval_rows=2))
    assert caught.value.exit_code == 143
    for name in ("model.safetensors", "train_results.json", "trainer_state.json", "README.md"):
        assert (tmp_path / name).exists(), name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("trains", [True, False])
def test_a_signal_in_the_last_evaluation_lets_it_end(tmp_path: Path, number: int, code: int, *, trains: bool) -> None:
    """What training leaves is there before it begins; what it measures is there before the run ends."""
    records = ["README.md", "all_results.json", "model.safetensors", "train_results.json", "trainer_state.json"]
    seen: list[list[str]] = []

    class Signalled(FakeEngine):
        def evaluate(self, micro_batches: Any, objective: Any = None) -> EvalReport:
            seen.append([name for name in records if (tmp_path / name).exists()])
            os.kill(os.getpid(), number)
            return super().evaluate(micro_batches, objective)

    before = signal.getsignal(number)
    config = make_config(tmp_path, max_steps=1, save_strategy="no", do_train=trains, do_eval=True)
    done = f"the model is in {tmp_path}" if trains else "the evaluation is done"
    with pytest.raises(Interrupted, match=f"the evaluation was finished first: {done}, and nothing is left to do$") as caught:
        run.run(make_loop(config, Signalled([1.0]), num_eval_rows=2))
    assert caught.value.exit_code == code and signal.getsignal(number) == before
    assert seen == [records if trains else []]
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"] == 2.0
    if trains:
        entries = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
        assert [entry["eval_loss"] for entry in entries if "eval_loss" in entry] == [2.0]


@pytest.mark.parametrize("broken", ["train_results.json", "all_results.json", "trainer_state.json", "README.md"])
def test_a_record_that_cannot_be_written_costs_neither_the_model_nor_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    real = Files.create

    def create(self: Files, path: Path) -> int:
        if path.name.startswith(f".{broken}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, path)

    monkeypatch.setattr(Files, "create", create)
    loop = make_loop(make_config(tmp_path, max_steps=2, save_strategy="no"), FakeEngine([1.0] * 2))
    named = {"all_results.json": "train_results.json"}.get(broken, broken)
    with pytest.raises(LayerFerryError, match=f"the model is in {tmp_path}, but not written were: {named} "):
        run.run(loop)
    assert f"{named} cannot be written: the disk is full: free space" in caplog.text
    names = {"train_results.json", "all_results.json", "trainer_state.json", "README.md"} - {broken}
    left = {path.name for path in tmp_path.iterdir()} - {"config.json", "model.safetensors", "trainer_log.jsonl"}
    assert (tmp_path / "model.safetensors").exists()
    assert left == names - ({"all_results.json"} if broken == "train_results.json" else set())


def test_what_was_done_is_said_exactly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = []
    for before, steps in ((0, 2), (2, 3), (3, 1)):
        loop = make_loop(make_config(tmp_path, max_steps=steps, save_strategy="no"), FakeEngine([1.0] * 3))
        loop = replace(loop, totals=Totals(step=before), cursor=Cursor(0, before))
        with caplog.at_level(logging.INFO, "layerferry"):
            run.run(loop)
        said.append(caplog.records[-1].getMessage().removesuffix(f" is in {tmp_path}"))
    assert said == [
        "trained 2 steps in 0:00:00; the model",
        "trained 1 step, 3 to 3, in 0:00:00; the model",
        "no step was left to train; the model of step 3",
    ]


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    loop = make_loop(make_config(tmp_path, max_steps=2, save_strategy="no"), FakeEngine([1.0, None, 2.0]))
    assert loop.run()["skipped_steps"] == 1


def test_a_signal_ends_the_run_behind_its_step(tmp_path: Path) -> None:
    class Signalled(FakeEngine):
        def step(self, micro_batches: Any, objective: Any = None, *, lr: float) -> StepReport:
            if sum(1 for name, _ in self.calls if name == "step") == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(micro_batches, objective, lr=lr)

    before = signal.getsignal(signal.SIGTERM)
    loop = make_loop(make_config(tmp_path, max_steps=5), Signalled([1.0] * 5))
    with pytest.raises(Interrupted, match="SIGTERM: stopped after step 2; checkpoint-2 is saved: the same command") as caught:
        loop.run()
    assert caught.value.exit_code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert RunState.read(tmp_path / "checkpoint-2").totals.step == 2


def test_evaluation_and_checkpoints_where_due(tmp_path: Path) -> None:
    engine = FakeEngine([1.0] * 8)
    config = make_config(
        tmp_path,
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="epoch",
        per_device_eval_batch_size=1,
    )
    loop = make_loop(config, engine, num_eval_rows=5)
    loop.run()
    assert [e["step"] for e in loop.history.entries if "eval_loss" in e] == [3, 6, 8]
    assert [value for name, value in engine.calls if name == "evaluate"] == [5, 5, 5]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}
    assert loop.schedule.observed == [2.0] * 3  # type: ignore[attr-defined]
    lines = read_lines(tmp_path / "trainer_log.jsonl")
    assert [line["eval_loss"] for line in lines if "eval_loss" in line] == [2.0] * 3
    calls = len(engine.calls)
    assert loop.evaluate(2.0)["eval_loss"] == 2.0
    assert len(engine.calls) == calls


def test_evaluation_is_the_token_mean_over_groups(tmp_path: Path) -> None:
    engine = FakeEngine([1.0], rows=1)
    loop = make_loop(make_config(tmp_path, max_steps=1, eval_strategy="steps", save_strategy="no"), engine, num_eval_rows=40)
    loop.run()
    assert [value for name, value in engine.calls if name == "evaluate"] == [16, 16, 8]


def test_a_fault_of_the_data_thread_reaches_the_caller(tmp_path: Path) -> None:
    loop = make_loop(make_config(tmp_path, max_steps=3, save_strategy="no"), FakeEngine([1.0] * 3, rows=0))
    with pytest.raises(DataError, match="holds nothing"):
        loop.run()
