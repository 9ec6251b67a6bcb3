"""LLaMA-Factory's rules for what a run takes up, through the front door."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from layerferry.checkpoint.lock import FolderLock
from layerferry.config import RESUME_NEVER, RESUME_NEWEST, TrainConfig
from layerferry.engine.engine import Engine, StepReport
from layerferry.errors import CheckpointError, ConfigError, LayerFerryError
from layerferry.trainer import asked, train
from layerferry.trainer.resume import Start, find_start
from tests.checkpoint.test_damage import damage
from tests.reliability.runs import cut, make_config, make_rows, prepare

Begins = Callable[..., int]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps under ``done``."""
    base = prepare(tmp_path_factory.mktemp("base"))
    train(make_config(base, base / "done", max_steps=3))
    return base


@pytest.fixture
def output(base: Path, tmp_path: Path) -> Path:
    """The same folder as a run leaves it that was killed behind checkpoint-2."""
    shutil.copytree(base / "done", tmp_path / "done")
    cut(tmp_path / "done", 2)
    return tmp_path / "done"


@pytest.fixture
def begins(base: Path, output: Path, caplog: pytest.LogCaptureFixture) -> Begins:
    """Train with other settings; the step that the run has begun behind."""

    def begin(**changes: Any) -> int:
        caplog.clear()
        with caplog.at_level(logging.INFO, "layerferry"):
            train(make_config(base, output, **{"max_steps": 3, **changes}))
        resumed = [record.getMessage() for record in caplog.records if record.getMessage().startswith("resuming ")]
        return int(resumed[0].split(": step ")[1].split()[0]) if resumed else 0

    return begin


def test_the_newest_unless_told_otherwise(begins: Begins, output: Path) -> None:
    assert begins() == 2
    assert begins(resume_from_checkpoint=RESUME_NEWEST) == 3
    assert begins(resume_from_checkpoint=str(output / "checkpoint-1")) == 1
    assert begins(resume_from_checkpoint=str(output / "checkpoint-1"), overwrite_output_dir=True) == 1
    assert begins(overwrite_output_dir=True) == 0
    assert begins(resume_from_checkpoint=RESUME_NEVER) == 0


def test_a_checkpoint_that_is_passed_over_is_spoken_of(begins: Begins, output: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert begins(overwrite_output_dir=True, save_strategy="no") == 0
    said = (
        f"checkpoint-2 is left alone: overwrite_output_dir is true; resume_from_checkpoint={output}/checkpoint-2 goes on from it"
    )
    assert said in [record.getMessage() for record in caplog.records]
    assert f"{output}/model.safetensors of an earlier run is replaced" not in caplog.text
    assert begins(resume_from_checkpoint=RESUME_NEVER, save_strategy="no") == 0
    said = [said.replace("overwrite_output_dir is true", "resume_from_checkpoint is false")]
    said.append(f"{output}/model.safetensors of an earlier run is replaced when this one ends: resume_from_checkpoint is false")
    assert [text for text in said if text not in caplog.text] == []
    assert begins(resume_from_checkpoint=f"{output}/checkpoint-2") == 2


def test_weights_without_a_checkpoint(begins: Begins, output: Path) -> None:
    for path in output.glob("checkpoint-*"):
        shutil.rmtree(path)
    (output / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds model.safetensors of an earlier run and no checkpoint; set overwrite"):
        begins()
    with pytest.raises(ConfigError, match="has no checkpoint to resume"):
        begins(resume_from_checkpoint=RESUME_NEWEST)
    assert begins(overwrite_output_dir=True) == 0


def test_a_replaced_run_is_not_taken_up(begins: Begins, output: Path) -> None:
    marker = json.loads((output / "latest").read_text())
    (output / "latest").write_text(json.dumps({**marker, "run": "feedfacefeedface", "checkpoint": None}))
    with pytest.raises(ConfigError, match=r"checkpoint-2 is of an earlier one. Set resume_from_checkpoint: .*/checkpoint-2, or"):
        begins()


def test_a_damaged_one_and_the_offer(begins: Begins, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = sorted((output / "checkpoint-2").glob("state-*"))[-1]
    damage(victim, "flipped inside")
    with (
        monkeypatch.context() as patch,
        pytest.raises(CheckpointError, match=r"state-.*damaged.* whole one: set .*checkpoint-1$"),
    ):
        patch.setattr("layerferry.engine.engine.Engine.step", lambda *a, **k: pytest.fail("a step was taken"))
        begins()
    assert begins(resume_from_checkpoint=str(output / "checkpoint-1")) == 1
    assert begins() == 3


def test_damage_is_no_other_data(begins: Begins, output: Path) -> None:
    """A flipped bit in what is compared with the data is told as damage, with the offer."""
    state = output / "checkpoint-2" / "run.json"
    content = state.read_bytes()
    for before, after in ((b'"rows": 11', b'"rows": 10'), (b'"usable"', b'"usabme"'), (b'"position"', b'"positinn"')):
        assert content.count(before) == 1
        state.write_bytes(content.replace(before, after))
        with pytest.raises(CheckpointError, match=r"run\.json: damaged .* whole one: set .*checkpoint-1$"):
            begins()


def test_a_branch_that_was_left_behind(begins: Begins, output: Path, base: Path, caplog: pytest.LogCaptureFixture) -> None:
    """checkpoint-3 is damaged, the run goes on from checkpoint-1 and keeps one: what it writes stays, and is what comes next."""
    shutil.copytree(base / "done" / "checkpoint-3", output / "checkpoint-3")
    (output / "latest").write_bytes((base / "done" / "latest").read_bytes())
    damage(sorted((output / "checkpoint-3").glob("state-*"))[-1], "flipped inside")
    with pytest.raises(CheckpointError, match=r"damaged.* whole one: set .*checkpoint-2$"):
        begins()
    assert begins(resume_from_checkpoint=str(output / "checkpoint-1"), max_steps=2, save_total_limit=1) == 1
    said = "checkpoint-3, checkpoint-2: not on the line of checkpoint-1, which this run goes on from: left alone"
    assert said in caplog.text and "save_total_limit" in caplog.text
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert begins(max_steps=3, save_total_limit=1) == 2
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"], "3 is not proven yet"


@pytest.mark.parametrize("arrival", [False, True])
def test_behind_weights_that_a_finite_step_has_spoilt(base: Path, output: Path, *, arrival: bool) -> None:
    """Step 3 spoils the weights and is saved; nothing behind it is finite. The one before is still there, and goes on as ever."""

    def begin(learning_rate: float, resume: str | None = None) -> None:
        config = make_config(
            base, output, max_steps=6, save_total_limit=1, max_skipped_steps=1, num_train_epochs=2, resume_from_checkpoint=resume
        )
        optim = replace(config.optim, learning_rate=learning_rate, lr_scheduler_type="constant", max_grad_norm=0.0)
        train(replace(config, optim=optim, engine=replace(config.engine, update_on_arrival=arrival)))

    for _ in range(2):  # the same command fails in the same way, and takes nothing away
        with pytest.raises(LayerFerryError, match=r"not finite.*checkpoint-3 may be spoilt too; go on .*/checkpoint-2$"):
            begin(1e30)
        assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    begin(1e-3, resume=str(output / "checkpoint-2"))
    assert (output / "model.safetensors").exists()
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]


def test_fewer_steps_than_are_done(begins: Begins, caplog: pytest.LogCaptureFixture) -> None:
    assert begins(max_steps=1) == 2
    assert "checkpoint-2 is beyond the 1 steps that max_steps or num_train_epochs make: nothing is trained" in caplog.text
    assert "no step was left to train; the model of step 2 is in" in caplog.text


def test_models_alone_do_not_push_the_state_out(begins: Begins, output: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert begins(save_only_model=True, save_total_limit=1) == 2
    assert "checkpoint-2 stays beside save_total_limit: 1: save_only_model writes none that can be resumed" in caplog.text
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    with pytest.raises(CheckpointError, match=r"holds the model only.* whole one: set .*checkpoint-2$"):
        begins()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": {"optim": "sgd"}}, "its optimizer kept .* start anew from its weights"),
        (
            {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
            "another model, or other trained parameters: only it trains",
        ),
    ],
)
def test_where_an_older_one_would_not_fit_either_none_is_offered(begins: Begins, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        begins(**changes)
    assert "resume_from_checkpoint" not in str(raised.value)


def test_nobody_else_may_write_while_the_start_is_looked_for(
    begins: Begins, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ended between our look and our lock would be overwritten from an older step."""
    seen = []

    def look(config: TrainConfig) -> Start | None:
        with pytest.raises(ConfigError, match="is in use by process"):
            FolderLock(output)
        seen.append(config.output_dir)
        return find_start(config)

    monkeypatch.setattr(asked, "find_start", look)
    assert begins() == 2 and seen == [str(output)]


def test_no_checkpoint_there(begins: Begins, output: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no manifest.json: no checkpoint of ours"):
        begins(resume_from_checkpoint=str(tmp_path))


def test_a_checkpoint_that_is_not_there(begins: Begins, output: Path) -> None:
    """What the message says of the run without the key is what that run does."""
    shutil.rmtree(output / "checkpoint-1")
    for name in ("checkpoint-1", "nowhere"):
        with pytest.raises(CheckpointError) as raised:
            begins(resume_from_checkpoint=str(output / name))
        said = (
            f"resume_from_checkpoint: {output / name} is not there. Without the key the run goes on from {output}/checkpoint-2, "
        )
        assert str(raised.value) == said + "the newest whole one in output_dir"
    with pytest.raises(CheckpointError, match="Without the key and overwrite_output_dir the run goes on from"):
        begins(resume_from_checkpoint=str(output / "nowhere"), overwrite_output_dir=True)
    assert begins() == 2
    shutil.rmtree(output / "checkpoint-2")
    (output / "checkpoint-3" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-9 is not there. There is no older whole checkpoint beside it$"):
        begins(resume_from_checkpoint=str(output / "checkpoint-9"))


def test_a_model_alone_is_no_checkpoint(begins: Begins, output: Path) -> None:
    assert begins(overwrite_output_dir=True, save_only_model=True) == 0
    names = {path.name for path in (output / "checkpoint-3").iterdir()}
    assert not [name for name in names if name.startswith("state-")] and "model.safetensors.index.json" in names
    with pytest.raises(CheckpointError, match="holds the model only"):
        begins()


def test_other_rows_are_refused_and_other_settings_told(
    base: Path, begins: Begins, output: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    (other / "model").parent.mkdir()
    shutil.copytree(base / "model", other / "model")
    rows = (base / "rows.jsonl").read_text()
    (other / "rows.jsonl").write_text(rows.replace("ferry river", "river ferry"))  # as many rows, and as long
    with pytest.raises(CheckpointError, match="another row somewhere"):
        train(make_config(other, output, max_steps=3))
    make_rows(other / "rows.jsonl", 12)
    with pytest.raises(CheckpointError, match="another number of training rows: 11 then, 12 now"):
        train(make_config(other, output, max_steps=3))
    assert begins(max_steps=4) == 2
    assert "changed since the checkpoint: total_steps: 3 -> 4" in caplog.text


def test_a_plan_that_rounds_otherwise_is_told_with_its_pins(base: Path, output: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the line calls other has other bits, and what it is silent about has the same."""

    def resumed(name: str, **pins: Any) -> tuple[bytes, str]:
        caplog.clear()
        config = make_config(base, output.parent / name, max_steps=3, resume_from_checkpoint=str(output / "checkpoint-2"))
        train(replace(config, engine=replace(config.engine, **pins)))
        told = [record.getMessage() for record in caplog.records if "is not that of the checkpoint" in record.getMessage()]
        return (output.parent / name / "model.safetensors").read_bytes(), "\n".join(told)

    whole = (base / "done" / "model.safetensors").read_bytes()
    assert resumed("other-slots", num_slots=4) == (whole, "")
    found, told = resumed("other-rows", micro_batch_rows=2, end_parts=2)
    line, _, pins = told.partition("to keep its bits set ")
    assert found != whole and line == (
        "the plan is not that of the checkpoint: micro_batch_rows: 1 -> 2, end_parts: 1 -> 2: from here on sums are rounded in "
        "another order, which is not wrong, but not bit for bit the run that was left; "
    )
    assert "micro_batch_rows: 1" in pins and "end_parts: 1" in pins
    assert resumed("pinned", **yaml.safe_load("{" + pins + "}")) == (whole, "")


def test_a_resumed_run_in_another_folder(base: Path, output: Path, tmp_path: Path) -> None:
    config = make_config(base, tmp_path / "elsewhere", max_steps=3, resume_from_checkpoint=str(output / "checkpoint-2"))
    train(config)
    lines = (tmp_path / "elsewhere" / "trainer_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["current_steps"] for line in lines] == [2, 3]


def test_no_room_is_found_before_the_first_step(begins: Begins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerferry.checkpoint.files.Files.free_bytes", lambda self, path: 1000)
    monkeypatch.setattr("layerferry.engine.engine.Engine.step", lambda *a, **k: pytest.fail("a step was taken"))
    short = r"a checkpoint needs .* are free: .* short. Free space, use another output_dir"
    with pytest.raises(CheckpointError, match=short + ", or set save_only_model: true$"):
        begins(overwrite_output_dir=True)
    with pytest.raises(CheckpointError, match=short + "$"):
        begins(overwrite_output_dir=True, save_only_model=True)


def test_the_folder_of_checkpoints_is_no_checkpoint(begins: Begins, output: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{output} is no checkpoint; the newest in it: {output}/checkpoint-2$"):
        begins(resume_from_checkpoint=str(output))


def test_a_folder_that_moves_while_a_run_writes(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its second step, A finds B's results where its own folder was: B's are left as they are, byte for byte."""
    output, moved, real = tmp_path / "out", tmp_path / "moved", Engine.step
    theirs: dict[str, bytes] = {}

    def step(engine: Engine, *given: Any, **named: Any) -> StepReport:
        report = real(engine, *given, **named)
        if (output / "checkpoint-1").is_dir() and not moved.exists():
            output.rename(moved)
            shutil.copytree(base / "done", output)
            theirs.update(bytes_of(output))
        return report

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "layerferry"):
        patch.setattr(Engine, "step", step)
        with pytest.raises(
            LayerFerryError, match="could not be .*; its weights are in .*/out-rescued-1 instead; with output_dir"
        ):
            train(make_config(base, output, max_steps=4))
    assert theirs and bytes_of(output) == theirs
    assert "checkpoint-4 could not be saved: " in caplog.text and "it was moved or replaced, or its disk" in caplog.text
    with caplog.at_level(logging.INFO, "layerferry"):
        train(make_config(base, moved, max_steps=4))
    train(make_config(base, tmp_path / "alone", max_steps=4))
    for folder in (moved, tmp_path / "out-rescued-1"):
        assert (folder / "model.safetensors").read_bytes() == (tmp_path / "alone" / "model.safetensors").read_bytes()


def test_a_folder_that_moves_while_the_model_is_evaluated(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is saved by then; results, state, card and pictures are not written into the successor's folder."""
    output, moved, real = tmp_path / "out", tmp_path / "moved", Engine.evaluate
    theirs: dict[str, bytes] = {}

    def evaluate(engine: Engine, *given: Any, **named: Any) -> Any:
        if not moved.exists():
            output.rename(moved)
            shutil.copytree(base / "done", output)
            theirs.update(bytes_of(output))
        return real(engine, *given, **named)

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    config = make_config(base, output, max_steps=2, do_eval=True, plot_loss=True)
    config = replace(config, data=replace(config.data, val_size=2.0), engine=replace(config.engine, timeline=True))
    missing = "eval_results.json, trainer_state.json, README.md, the pictures of the loss"
    with pytest.raises(LayerFerryError, match=f"but not written were: {missing} "):
        train(config)
    assert theirs and bytes_of(output) == theirs
    assert {"model.safetensors", "README.md", "train_results.json", "timeline.png"} <= {path.name for path in moved.iterdir()}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_other_evaluation_sets_are_measured_again(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No step is left: the number is that of the sets that are named now, as an evaluation of the model alone finds it."""
    output = tmp_path / "out"
    one, other = make_rows(tmp_path / "one.jsonl", 2), make_rows(tmp_path / "other.jsonl", 5)

    def loss(evals: Path, output: Path = output, **changes: Any) -> float:
        data = {"eval_dataset": (str(evals),)}
        caplog.clear()
        with caplog.at_level(logging.INFO, "layerferry"):
            train(make_config(base, output, data=data, **{"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **changes}))
        return float(json.loads((output / "eval_results.json").read_text())["eval_loss"])

    expected = loss(other, tmp_path / "other")
    first = loss(one)
    assert first != expected
    assert loss(one) == first and "step 2/2: eval_loss" not in caplog.text
    assert loss(other) == expected and "step 2/2: eval_loss" in caplog.text
