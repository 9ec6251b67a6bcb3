"""Which checkpoint is taken up, which is offered instead, which may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerferry.checkpoint.checksum import sums_of
from layerferry.checkpoint.files import Files
from layerferry.checkpoint.folders import (
    Latest,
    candidates,
    checkpoints,
    older_whole,
    open_checkpoint,
    read_latest,
    remove_old,
    with_offer,
    write_latest,
)
from layerferry.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from layerferry.errors import CheckpointError

OWN, OTHER = "0123456789abcdef", "feedfacefeedface"


def make(output: Path, step: int, *, run: str = OWN, resumable: bool = True) -> Path:
    folder = output / f"checkpoint-{step}"
    folder.mkdir()
    content = f"step {step}".encode()
    (folder / "state-1").write_bytes(content)
    records = {"state-1": FileRecord(num_bytes=len(content), sums=sums_of(content))}
    manifest = Manifest(run=run, step=step, resumable=resumable, state_planes={}, files=records, versions={})
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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 1}', '{"run": "x", "checkpoint": "../../etc"}', "\xff"])
def test_a_marker_that_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest").write_bytes(text.encode("latin-1"))
    found = read_latest(tmp_path)
    assert found is None or found.checkpoint is None


def test_removal_spares_other_runs_and_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step, run=OTHER if step == 1 else OWN)
    (tmp_path / "checkpoint-0").mkdir()
    assert remove_old(Files(), tmp_path, run=OWN, keep=None) == []
    assert names(remove_old(Files(), tmp_path, run=OWN, keep=2)) == ["checkpoint-2"]
    assert names(remove_old(Files(), tmp_path, run=OWN, keep=0)) == ["checkpoint-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-0", "checkpoint-1", "checkpoint-4"]


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
