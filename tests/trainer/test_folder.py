"""The output folder: refused early, tried without a trace, cleared of what another run has left."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from layerferry.config import ModelConfig, TrainConfig
from layerferry.errors import ConfigError
from layerferry.trainer.folder import check_source, claim, clear
from layerferry.trainer.output import OutputFolder
from tests.trainer.fakes import make_config


def config(folder: Path, **train: object) -> TrainConfig:
    return TrainConfig(output_dir=str(folder), **train)  # type: ignore[arg-type]


def test_trying_leaves_nothing(tmp_path: Path) -> None:
    claim(config(tmp_path / "a" / "b")).close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(ConfigError, match=f"output_dir: {folder} cannot be written"):
            claim(config(folder))


@pytest.mark.parametrize("name", ["", " "])
def test_a_folder_without_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="output_dir: empty"):
        claim(TrainConfig(output_dir=name))


def test_a_folder_that_nobody_may_write() -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        claim(config(Path("/proc/layerferry")))


@pytest.mark.parametrize(
    "name",
    [
        *("all_results.json", "train_results.json", "trainer_state.json", "README.md", "latest", "model.safetensors"),
        *("trainer_log.jsonl", "config.json", "training_loss.png", "chat_template.jinja", "skipped_batches.json"),
    ],
)
@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_something_else_where_a_file_of_the_run_belongs(tmp_path: Path, name: str, kind: str) -> None:
    """Found before anything is loaded, not after the last step; and what may lie there is left alone."""
    (tmp_path / name).mkdir() if kind == "directory" else os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"output_dir: {tmp_path / name} is a {kind[:4]}.* belongs: move it away$"):
        claim(config(tmp_path))
    (tmp_path / name).rmdir() if kind == "directory" else (tmp_path / name).unlink()
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "runs").mkdir()
    claim(config(tmp_path)).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "runs"]


def test_a_log_that_is_a_link_is_refused_and_not_written_through(tmp_path: Path) -> None:
    folder, precious = tmp_path / "out", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("precious")
    (folder / "trainer_log.jsonl").symlink_to(precious)
    with pytest.raises(ConfigError, match="trainer_log.jsonl is a link, and the log is written in place: remove it"):
        claim(config(folder))
    for name in ("latest", "README.md"):
        (folder / name).symlink_to(precious)  # these are replaced, so a link may be there
    (folder / "trainer_log.jsonl").unlink()
    claim(config(folder)).close()
    assert precious.read_text() == "precious"


def test_opening_starts_a_new_log(tmp_path: Path) -> None:
    (tmp_path / "trainer_log.jsonl").write_text("{}\n")
    (tmp_path / ".partial-x").mkdir()
    clear(OutputFolder(tmp_path), config(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_resuming_keeps_the_log(tmp_path: Path) -> None:
    (tmp_path / "trainer_log.jsonl").write_text("{}\n")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / ".partial-removed-checkpoint-2").mkdir()
    clear(OutputFolder(tmp_path), config(tmp_path), resumes=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "trainer_log.jsonl"]


def test_results_do_not_replace_what_a_run_starts_from(tmp_path: Path) -> None:
    model, link = tmp_path / "model", tmp_path / "link"
    model.mkdir()
    link.symlink_to(model)
    for output in (model, link):
        run = replace(make_config(output), model=ModelConfig(model_name_or_path=str(model)))
        with pytest.raises(ConfigError, match=f"output_dir: {output} is the model that training starts from .*: use another"):
            check_source(run)
        check_source(replace(run, train=replace(run.train, do_train=False)))
    check_source(make_config(tmp_path / "out"))
    (model / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"output_dir: {model} is a checkpoint, and results would replace its files"):
        claim(config(model))
    assert [path.name for path in model.iterdir()] == ["manifest.json"]
