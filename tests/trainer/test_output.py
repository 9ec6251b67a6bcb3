"""Files of a run: filled whole or not at all, and none of them in a folder that is no longer the run's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from layerferry.checkpoint.lock import FolderLock, FolderMoved, LockedFiles
from layerferry.trainer.output import OutputFolder, json_line


def fill(output: OutputFolder) -> None:
    with output.filling() as filled:
        (filled / "model.safetensors").write_text("ours")


def lose_the_folder_while_filling(output: OutputFolder) -> None:
    with output.filling() as filled:
        (filled / "model.safetensors").write_text("ours")
        replace(output.path)


def replace(folder: Path) -> None:
    """Somebody moves the folder, and another run's stands in its place."""
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    for name in ("README.md", "trainer_log.jsonl", "model.safetensors", "model.safetensors.index.json"):
        (folder / name).write_text("theirs")


WRITERS: dict[str, Callable[[OutputFolder], None]] = {
    "write": lambda output: output.write("README.md", b"ours"),
    "write_json": lambda output: output.write_json("new.json", {}),
    "append": lambda output: output.append("trainer_log.jsonl", "ours"),
    "remove": lambda output: output.remove("README.md"),
    "fill": fill,
}


@pytest.mark.parametrize("name", [*WRITERS, "moved while it is filled"])
def test_nothing_is_written_into_the_folder_of_a_successor(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "out"
    with FolderLock(folder) as lock:
        output = OutputFolder(folder, LockedFiles(lock))
        for write in WRITERS.values():
            write(output)
        if name in WRITERS:
            replace(folder)
        with pytest.raises(FolderMoved):
            WRITERS.get(name, lose_the_folder_while_filling)(output)
        assert {path.read_text() for path in folder.iterdir()} == {"theirs"} and len(list(folder.iterdir())) == 4


def test_a_folder_beside_is_new_and_goes_where_it_fails(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path / "out")
    (tmp_path / "out-rescued-1").mkdir()
    with output.beside() as folder:
        (folder / "a").write_text("a")
    with pytest.raises(OSError), output.beside() as failed:
        (failed / "a").write_text("half")
        raise OSError(28, "full")
    assert folder.name == "out-rescued-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-rescued-1", "out-rescued-2"]


def test_lines_are_added_and_never_through_a_link(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path)
    output.append("log", "a\n")
    output.append("log", "b\n")
    assert (tmp_path / "log").read_text() == "a\nb\n"
    (tmp_path / "link").symlink_to(tmp_path / "log")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            output.append(name, "c")
    assert (tmp_path / "log").read_text() == "a\nb\n"


def test_numbers_that_are_not_finite_are_no_json(tmp_path: Path) -> None:
    value = {"a": math.nan, "b": [math.inf, 1.0]}
    OutputFolder(tmp_path).write_json("x.json", value)
    expected = {"a": None, "b": [None, 1.0]}
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=lambda name: 1 / 0) == expected
    assert json.loads(json_line(value)) == expected and len(list(tmp_path.iterdir())) == 1


def test_whole_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError), OutputFolder(tmp_path).filling() as filled:
        (filled / "a").write_text("half")
        raise OSError(28, "full")
    assert (tmp_path / "a").read_text() == "old"
    with OutputFolder(tmp_path).filling() as filled:
        (filled / "a").write_text("new")
    assert (tmp_path / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@pytest.mark.parametrize("before", [(SINGLE,), (INDEX, *SHARDS), (INDEX, "model-00001-of-00003.safetensors"), (INDEX, SINGLE)])
@pytest.mark.parametrize("after", [(SINGLE,), (INDEX, *SHARDS)])
def test_weights_of_an_earlier_run_are_never_mixed_with_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """Whatever transformers finds first (one file, then the index), it and all behind it are old or new, at every moment."""

    def assert_one_model(folder: Path) -> None:
        there = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
        kinds = {there[SINGLE]} if SINGLE in there else {there.get(name) for name in (INDEX, *SHARDS) if INDEX in there}
        assert kinds in (set(), {"new"}, {"old"}, {"old", None}), there

    real, moves = os.rename, []

    def rename(source: str | Path, target: str | Path) -> None:
        assert_one_model(tmp_path)
        real(source, target)
        moves.append(target)
        assert_one_model(tmp_path)

    for name in before:
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(os, "rename", rename)
    with OutputFolder(tmp_path).filling() as filled:
        for name in (*after, "config.json"):
            (filled / name).write_text("new")
    assert len(moves) == len(after) + 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys((*after, "config.json"), "new")
