"""The output folder: refused early, tried without a trace, filled whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerferry.config import TrainConfig
from layerferry.errors import ConfigError
from layerferry.trainer.folder import claim, open_folder, whole_files


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


def test_opening_starts_a_new_log(tmp_path: Path) -> None:
    (tmp_path / "trainer_log.jsonl").write_text("{}\n")
    (tmp_path / ".partial-x").mkdir()
    assert open_folder(config(tmp_path)) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_resuming_keeps_the_log(tmp_path: Path) -> None:
    (tmp_path / "trainer_log.jsonl").write_text("{}\n")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / ".partial-removed-checkpoint-2").mkdir()
    open_folder(config(tmp_path), resumes=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "trainer_log.jsonl"]


def test_whole_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError), whole_files(tmp_path) as filled:
        (filled / "a").write_text("half")
        raise OSError(28, "full")
    assert (tmp_path / "a").read_text() == "old"
    with whole_files(tmp_path) as filled:
        (filled / "a").write_text("new")
    assert (tmp_path / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
