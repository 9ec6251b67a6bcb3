"""The output folder: refused early, tried without a trace, filled whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerferry.config import RESUME_NEVER, RESUME_NEWEST, TrainConfig
from layerferry.errors import ConfigError
from layerferry.trainer.folder import check_folder, open_folder, whole_files, whole_folder


def config(folder: Path, **train: object) -> TrainConfig:
    return TrainConfig(output_dir=str(folder), **train)  # type: ignore[arg-type]


def test_trying_leaves_nothing(tmp_path: Path) -> None:
    check_folder(config(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(ConfigError, match=f"output_dir: {folder} cannot be written"):
            check_folder(config(folder))


def test_a_folder_that_nobody_may_write() -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        check_folder(config(Path("/proc/layerferry")))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "checkpoint-5"])
def test_an_earlier_run_is_not_overwritten_unless_asked(tmp_path: Path, name: str) -> None:
    if name.startswith("checkpoint"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{name} of an earlier run; set overwrite_output_dir: true"):
        check_folder(config(tmp_path))
    check_folder(config(tmp_path, overwrite_output_dir=True))
    check_folder(config(tmp_path, resume_from_checkpoint=RESUME_NEVER))
    check_folder(config(tmp_path, do_train=False))


def test_other_files_are_no_obstacle(tmp_path: Path) -> None:
    for name in ("training_args.bin", "trainer_log.jsonl", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    check_folder(config(tmp_path))


@pytest.mark.parametrize("value", [RESUME_NEWEST, "out/checkpoint-3"])
def test_resuming_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="not there yet"):
        check_folder(config(tmp_path, resume_from_checkpoint=value))


def test_opening_starts_a_new_log(tmp_path: Path) -> None:
    (tmp_path / "trainer_log.jsonl").write_text("{}\n")
    (tmp_path / ".partial-x").mkdir()
    assert open_folder(config(tmp_path)) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_whole_folder_replaces_or_vanishes(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-1"
    with whole_folder(target) as filled:
        (filled / "old").write_text("1")
        assert not target.exists()
    with pytest.raises(OSError), whole_folder(target) as filled:
        (filled / "new").write_text("2")
        raise OSError(28, "full")
    assert [path.name for path in target.iterdir()] == ["old"]
    with whole_folder(target) as filled:
        (filled / "new").write_text("2")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


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
