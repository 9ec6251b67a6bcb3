"""What is saved beside the planes, what a person is told, and that a fault of the disk does not end the run."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from layerferry.checkpoint.files import Files
from layerferry.checkpoint.folders import Latest, write_latest
from layerferry.config import Config, EngineConfig, ModelConfig
from layerferry.engine.pretrained import save_tokenizer
from layerferry.errors import LayerFerryError
from layerferry.plan import Item, Plan
from layerferry.trainer import run
from layerferry.trainer.checkpoints import Checkpoints, behind_a_spoilt_step, save_model, side_files
from layerferry.trainer.output import OutputFolder
from layerferry.trainer.state import RunState
from tests.checkpoint.test_folders import OTHER, OWN, make
from tests.trainer.fakes import FakeEngine, FakeSaver, make_config, make_loop


def test_small_files_of_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop(make_config(tmp_path), FakeEngine([]))
    loop.history.add({"loss": 1.0}, step=2, epoch=0.5)
    loop.history.step_done(3)
    checkpoints = Checkpoints(FakeSaver(tmp_path), {"config.json": b"{}"})  # type: ignore[arg-type]
    checkpoints.save(3, loop.state(), loop.history)
    assert not checkpoints.is_whole(3)
    with caplog.at_level(logging.INFO, "layerferry"):
        checkpoints.report(wait=True)
    assert (
        checkpoints.is_whole(3)
        and f"saved {tmp_path / 'checkpoint-3'} (0.93 GiB in 1.0 s, 1.00 GB/s; updates waited 0.2 s)" in caplog.text
    )
    names = sorted(path.name for path in (tmp_path / "checkpoint-3").iterdir())
    assert names == ["config.json", "run.json", "trainer_log.jsonl", "trainer_state.json"]
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3
    assert RunState.read(tmp_path / "checkpoint-3").entries == loop.history.entries


def test_one_step_is_saved_once(tmp_path: Path) -> None:
    loop = make_loop(make_config(tmp_path), FakeEngine([]))
    saver = FakeSaver(tmp_path)
    checkpoints = Checkpoints(saver, {})  # type: ignore[arg-type]
    for step in (1, 1, 2):
        checkpoints.save(step, loop.state(), loop.history)
    assert saver.started == [1, 2]


def test_a_save_that_failed_is_tried_again(tmp_path: Path) -> None:
    """A signal at a step whose save has failed: the disk may be well again."""
    loop = make_loop(make_config(tmp_path), FakeEngine([]))
    saver = FakeSaver(tmp_path, faults={1: "full"})
    checkpoints = Checkpoints(saver, {})  # type: ignore[arg-type]
    checkpoints.save(1, loop.state(), loop.history)
    saver.faults.clear()
    checkpoints.save(1, loop.state(), loop.history)
    checkpoints.report(wait=True)
    assert saver.started == [1, 1] and checkpoints.is_whole(1)


def test_a_fault_is_told_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop(make_config(tmp_path), FakeEngine([]))
    checkpoints = Checkpoints(FakeSaver(tmp_path, faults={1: "the disk is full: free space"}), {})  # type: ignore[arg-type]
    checkpoints.save(1, loop.state(), loop.history)
    with caplog.at_level(logging.ERROR, "layerferry"):
        checkpoints.save(2, loop.state(), loop.history)
    assert "checkpoint-1 could not be saved: the disk is full: free space; earlier checkpoints are untouched" in caplog.text
    checkpoints.report(wait=True)
    assert checkpoints.is_whole(2) and not checkpoints.is_whole(1)


def test_the_last_save_fails_loudly_and_whole(tmp_path: Path) -> None:
    with pytest.raises(
        LayerFerryError, match="the disk is full: .*; the same command starts anew, for no checkpoint can be resumed$"
    ):
        save_model(OutputFolder(tmp_path), FakeEngine([], saves_fail=True))
    assert list(tmp_path.iterdir()) == []
    make(tmp_path, 7)
    make(tmp_path, 8, resumable=False)
    make(tmp_path, 9, run=OTHER)
    write_latest(Files(), tmp_path, Latest(run=OWN, checkpoint="checkpoint-8"))
    with pytest.raises(LayerFerryError, match=r"full: .*; the same command goes on from checkpoint-7 \(without overwrite"):
        save_model(OutputFolder(tmp_path), FakeEngine([], saves_fail=True))
    with pytest.raises(
        LayerFerryError, match="could not be saved into .*: the folder has vanished: .*; when it is back, the same command"
    ):
        save_model(OutputFolder(tmp_path / "gone"), FakeEngine([]))


def test_weights_are_not_lost_for_want_of_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("half")
            raise Exception("No space left on device (os error 28)")  # as the tokenizers library does

    loop = make_loop(make_config(tmp_path, max_steps=1, save_strategy="no"), FakeEngine([1.0]))
    loop.tokenizer = Tokenizer()
    with pytest.raises(LayerFerryError, match=f"the model is in {tmp_path}, but not written were: the tokenizer "):
        run.run(loop)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights" and not (tmp_path / "tokenizer.json").exists()
    assert "the tokenizer cannot be written: No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "there is no checkpoint from before: start anew"),
        ((5,), "checkpoint-5 may be spoilt too; there is no checkpoint from before: start anew"),
        ((3, 4, 5), "checkpoint-5 may be spoilt too; go on from the newest .*: resume_from_checkpoint: .*/checkpoint-4"),
        ((3,), "go on from the newest that a finite step has proven: resume_from_checkpoint: .*/checkpoint-3"),
    ],
)
def test_behind_a_spoilt_step(tmp_path: Path, steps: tuple[int, ...], message: str) -> None:
    """Step 6 was not finite: what was saved behind step 5 may be the cause, what was saved before has been seen to be well."""
    for step in steps:
        make(tmp_path, step)
    make(tmp_path, 2, resumable=False)
    make(tmp_path, 9, run=OTHER)
    write_latest(Files(), tmp_path, Latest(run=OWN, checkpoint=None))
    assert re.fullmatch(message, behind_a_spoilt_step(OutputFolder(tmp_path), 5))


def test_a_tokenizer_that_the_disk_does_not_take(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            raise Exception("File too large (os error 27)")  # as the tokenizers library does

    with pytest.raises(OSError, match="the tokenizer cannot be written: File too large"):
        save_tokenizer(Tokenizer(), tmp_path)

    engine = SimpleNamespace(folder=SimpleNamespace(write_config=lambda folder, store: None), store=None)
    with pytest.raises(LayerFerryError, match="File too large .*: free the disk of temporary files, or set TMPDIR"):
        side_files(engine, Tokenizer())  # type: ignore[arg-type]


@pytest.mark.parametrize(("one_memory", "left"), [(False, 40), (True, 15)])
def test_copies_of_a_checkpoint_take_what_host_memory_leaves(
    one_memory: bool, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a CPU's, what the device needs is taken too."""
    monkeypatch.setattr(run, "host_limits", lambda: [SimpleNamespace(num_bytes=1000)])
    items = (Item(what="planes", place="@host", num_bytes=60), Item(what="slots", place="@device", num_bytes=25))
    config = Config(model=ModelConfig(model_name_or_path="none"), engine=EngineConfig(host_memory=100))
    assert run.spare_bytes(config, Plan(items=items), one_memory=one_memory) == left
    assert run.spare_bytes(replace(config, engine=EngineConfig()), Plan(items=items), one_memory=one_memory) == 500
