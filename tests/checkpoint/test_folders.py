"""Which checkpoint is taken up, which is offered instead, which may go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from layerferry.checkpoint.checksum import sums_of
from layerferry.checkpoint.files import Files
from layerferry.checkpoint.folders import (
    Latest,
    Line,
    candidates,
    checkpoints,
    clear_leftovers,
    left_behind,
    older_whole,
    open_checkpoint,
    read_latest,
    remove_old,
    with_offer,
    write_latest,
)
from layerferry.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from layerferry.errors import CheckpointError

OWN, OTHER, THIRD = "0123456789abcdef", "feedfacefeedface", "cafecafecafecafe"


def make(output: Path, step: int, *, run: str = OWN, line: Line = (), resumable: bool = True) -> Path:
    folder = output / f"checkpoint-{step}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    content = f"step {step}".encode()
    (folder / "state-1").write_bytes(content)
    records = {"state-1": FileRecord(num_bytes=len(content), sums=sums_of(content))}
    facts: dict[str, Any] = {"state_planes": {}, "trained": (), "versions": {}}
    manifest = Manifest(run=run, line=line, step=step, resumable=resumable, files=records, **facts)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return folder


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_numbers_not_letters_decide(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        make(tmp_path, step)
    (tmp_path / "checkpoint-1000").write_text("a file")
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / ".partial-checkpoint-500").mkdir()
    assert names(checkpoints(tmp_path)) == names(candidates(tmp_path)) == ["checkpoint-100", "checkpoint-20", "checkpoint-9"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_a_replaced_run_is_not_taken_up(tmp_path: Path) -> None:
    make(tmp_path, 100, run=OTHER)
    write_latest(Files(), tmp_path, Latest(run=OWN, checkpoint=None))
    assert candidates(tmp_path) == []
    make(tmp_path, 5)
    assert names(candidates(tmp_path)) == ["checkpoint-5"]  # even before the marker has moved
    write_latest(Files(), tmp_path, Latest(run=OWN, checkpoint="checkpoint-5"))
    assert read_latest(tmp_path) == Latest(run=OWN, checkpoint="checkpoint-5")
    assert names(candidates(tmp_path)) == ["checkpoint-5"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"run": 1}', '{"run": "x", "checkpoint": "../../etc"}', "\xff", "[" * 200_000, '{"a":' * 200_000),
        *('{"run": "x", "line": 3}', '{"run": "x", "line": [["x"]]}', '{"run": "x", "line": [["0123456789abcdef", "y"]]}'),
    ],
)
def test_a_marker_that_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest").write_bytes(text.encode("latin-1"))
    found = read_latest(tmp_path)
    assert found is None or found.checkpoint is None


@pytest.mark.parametrize("kind", ["directory", "pipe", "link to nothing"])
def test_a_marker_that_is_no_file(tmp_path: Path, kind: str) -> None:
    make(tmp_path, 5)
    path = tmp_path / "latest"
    {"directory": path.mkdir, "pipe": lambda: os.mkfifo(path), "link to nothing": lambda: path.symlink_to("nowhere")}[kind]()
    assert read_latest(tmp_path) is None and names(candidates(tmp_path)) == ["checkpoint-5"]


def resumed(output: Path, run: str, line: Line) -> Latest:
    """The marker that a run writes which begins behind the last of ``line``, before its first step."""
    latest = Latest(run=run, checkpoint=f"checkpoint-{line[-1][1]}", line=line)
    write_latest(Files(), output, latest)
    return latest


def test_what_a_run_leaves_behind_is_neither_taken_up_nor_counted_nor_removed(tmp_path: Path) -> None:
    """4 8 12 of one run; a second one goes on from 8, a third from what that has written."""
    for step in (4, 8, 12):
        make(tmp_path, step, run=OWN)
    latest = resumed(tmp_path, OTHER, ((OWN, 8),))
    assert names(candidates(tmp_path)) == ["checkpoint-8", "checkpoint-4"], "from the first moment on"
    assert names(left_behind(tmp_path, latest)) == ["checkpoint-12"]
    make(tmp_path, 10, run=OTHER, line=latest.line)
    assert names(candidates(tmp_path)) == ["checkpoint-10", "checkpoint-8", "checkpoint-4"], "killed before the marker has moved"
    latest = resumed(tmp_path, THIRD, ((OWN, 8), (OTHER, 10)))
    make(tmp_path, 13, run=THIRD, line=latest.line)
    assert names(candidates(tmp_path)) == ["checkpoint-13", "checkpoint-10", "checkpoint-8", "checkpoint-4"]
    assert names(remove_old(Files(), tmp_path, latest, keep=1)) == ["checkpoint-10", "checkpoint-8", "checkpoint-4"]
    assert names(left_behind(tmp_path, latest)) == names(checkpoints(tmp_path)[1:]) == ["checkpoint-12"]


def test_lower_numbers_may_be_left_behind_too(tmp_path: Path) -> None:
    """4 8 12 of one run; a second one goes on from 4 and saves at 10: 8 is no part of its past."""
    for step in (4, 8, 12):
        make(tmp_path, step, run=OWN)
    latest = resumed(tmp_path, OTHER, ((OWN, 4),))
    newest = make(tmp_path, 10, run=OTHER, line=latest.line)
    write_latest(Files(), tmp_path, Latest(run=OTHER, checkpoint=newest.name, line=latest.line))
    assert names(left_behind(tmp_path, latest)) == ["checkpoint-12", "checkpoint-8"]
    assert older_whole(newest) == tmp_path / "checkpoint-4"
    assert older_whole(tmp_path / "checkpoint-12") == tmp_path / "checkpoint-8", "whoever asks for the other line gets that one"


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    """Up to the newest one on the line it must be spoken of; beyond that it was left behind."""
    for step in (4, 8, 12):
        make(tmp_path, step)
        (tmp_path / f"checkpoint-{step}" / MANIFEST).write_text("[" * 100_000)
    resumed(tmp_path, OTHER, ((OWN, 8),))
    assert names(candidates(tmp_path)) == ["checkpoint-8", "checkpoint-4"]
    (tmp_path / "latest").unlink()
    assert names(candidates(tmp_path)) == ["checkpoint-12", "checkpoint-8", "checkpoint-4"]


def test_removal_spares_other_runs_and_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step, run=OTHER if step == 1 else OWN)
    (tmp_path / "checkpoint-0").mkdir()
    latest = Latest(run=OWN, checkpoint="checkpoint-4")
    assert remove_old(Files(), tmp_path, latest, keep=None) == []
    assert names(remove_old(Files(), tmp_path, latest, keep=2)) == ["checkpoint-2"]
    assert names(remove_old(Files(), tmp_path, latest, keep=0)) == ["checkpoint-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-0", "checkpoint-1", "checkpoint-4"]


class Stubborn(Files):
    """Cannot remove what has a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def remove(self, path: Path) -> None:
        if path.name.endswith(self._name):
            raise PermissionError(13, "Permission denied")
        super().remove(path)


def test_one_that_cannot_be_removed_keeps_none_of_the_others(tmp_path: Path) -> None:
    latest = Latest(run=OWN, checkpoint="checkpoint-4")
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    for _ in range(2):  # the second time it is a leftover
        with pytest.raises(PermissionError):
            remove_old(Stubborn("checkpoint-2"), tmp_path, latest, keep=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-removed-checkpoint-2", "checkpoint-4"]
    (tmp_path / ".partial-x").mkdir()
    assert [path.name for path in clear_leftovers(Stubborn("checkpoint-2"), tmp_path)] == [".partial-removed-checkpoint-2"]
    assert not (tmp_path / ".partial-x").exists()
    assert not clear_leftovers(Files(), tmp_path) and names(list(tmp_path.iterdir())) == ["checkpoint-4"]


def test_the_newest_that_can_be_resumed_is_never_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step, resumable=step < 3)
    latest = Latest(run=OWN, checkpoint="checkpoint-4")
    assert names(remove_old(Files(), tmp_path, latest, keep=1)) == ["checkpoint-3", "checkpoint-1"]
    make(tmp_path, 5)
    assert names(remove_old(Files(), tmp_path, latest, keep=1)) == ["checkpoint-4", "checkpoint-2"]


def test_the_newest_proven_one_stays_beside_one_that_is_not(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    latest = Latest(run=OWN, checkpoint="checkpoint-3")
    assert names(remove_old(Files(), tmp_path, latest, keep=1, unproven=3)) == ["checkpoint-1"]
    make(tmp_path, 4, resumable=False)
    assert names(remove_old(Files(), tmp_path, latest, keep=2, unproven=4)) == ["checkpoint-2"], "3 can be resumed, and is proven"
    make(tmp_path, 5)
    assert names(remove_old(Files(), tmp_path, latest, keep=1, unproven=5)) == ["checkpoint-4"]
    assert names(remove_old(Files(), tmp_path, latest, keep=1)) == ["checkpoint-3"], "5 is proven"


def test_a_folder_that_somebody_has_renamed(tmp_path: Path) -> None:
    """Its step is what its manifest says; what it was renamed for is its owner's affair, so it stays."""
    make(tmp_path, 12).rename(tmp_path / "checkpoint-99")
    latest = Latest(run=OWN, checkpoint="checkpoint-13")
    make(tmp_path, 13)
    assert names(candidates(tmp_path)) == ["checkpoint-13", "checkpoint-99"]
    assert remove_old(Files(), tmp_path, latest, keep=1) == []


def test_the_next_older_whole_one_is_offered(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step, resumable=step != 2)
    (tmp_path / "checkpoint-3" / "state-1").write_bytes(b"stex 3")  # right size, wrong byte
    (tmp_path / "checkpoint-4" / "state-1").write_bytes(b"step")
    assert older_whole(tmp_path / "checkpoint-4") == tmp_path / "checkpoint-1"
    with pytest.raises(CheckpointError, match=r"4 bytes, written were 6.*set resume_from_checkpoint: .*/checkpoint-1$"):
        open_checkpoint(tmp_path / "checkpoint-4")
    with pytest.raises(CheckpointError, match="holds the model only"):
        open_checkpoint(tmp_path / "checkpoint-2")
    assert "no older whole checkpoint" in str(with_offer(CheckpointError("x"), tmp_path / "checkpoint-1"))
