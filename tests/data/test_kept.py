"""Tokenised sets on disk: ours come back, LLaMA-Factory's are read, anything else is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from layerferry.data import kept
from layerferry.data.samples import Row, SampleSet
from layerferry.errors import DataError


def write_theirs(folder: Path, splits: dict[str, list[dict[str, Any]]]) -> None:
    """The layout that LLaMA-Factory's saved sets have: one folder of Arrow streams a split."""
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for name, rows in splits.items():
        (folder / name).mkdir()
        members = [f"data-{n:05}-of-00002.arrow" for n in range(2)]
        (folder / name / "state.json").write_text(json.dumps({"_data_files": [{"filename": member} for member in members]}))
        for member, part in zip(members, (rows[:1], rows[1:]), strict=True):
            table = pa.Table.from_pylist(part, schema=pa.Table.from_pylist(rows).schema)
            with pa.ipc.new_stream(folder / name / member, table.schema) as writer:
                writer.write_table(table)


def test_ours_come_back(tmp_path: Path) -> None:
    sets = {name: SampleSet(iter([Row(input_ids=[1, 2], labels=[-100, 2])]), isolated=True) for name in ("eval", "train")}
    assert kept.load(tmp_path / "none", isolated=False) is None
    kept.save(tmp_path / "new", sets)
    found = kept.load(tmp_path / "new", isolated=False)
    assert found is not None and set(found) == set(sets)
    assert found["train"].isolated and found["train"][0].labels.tolist() == [-100, 2]


def test_a_run_that_was_killed_while_it_saved_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not in that of one that saves beside it."""
    sets = {name: SampleSet(iter([Row(input_ids=[1, 2], labels=[-100, 2])])) for name in ("eval", "train")}
    real, files = np.savez, list[Path]()

    def savez(stream: Any, **arrays: Any) -> None:
        files.append(Path(stream.name))
        if len(files) == 2:
            stream.write(b"PK half")
            raise KeyboardInterrupt
        real(stream, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", savez)
        patch.setattr(os, "getpid", lambda: 7)
        with pytest.raises(KeyboardInterrupt):
            kept.save(tmp_path, sets)
    assert all(path.exists() for path in files) and kept.load(tmp_path, isolated=False) is None
    kept.save(tmp_path, sets)
    assert set(kept.load(tmp_path, isolated=False) or ()) == {"eval", "train"}


def test_llamafactorys_are_read(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 2, 0], "labels": [-100, 6, 7, -100], "position_ids": [0, 1, 0, 0]}
    text = {"input_ids": [5, 6], "attention_mask": [1, 1]}
    write_theirs(tmp_path / "a", {"train": [row, row, row], "validation": [row], "validation_other": [row]})
    found = kept.load(tmp_path / "a", isolated=True)
    assert found is not None
    assert {name: len(samples) for name, samples in found.items()} == {"train": 3, "eval": 1, "other": 1}
    sample = found["train"][2]
    assert sample.isolated and sample.position_ids is not None
    assert (sample.input_ids.tolist(), sample.labels.tolist(), sample.position_ids.tolist()) == (
        [5, 6, 7],
        [-100, 6, 7],
        [0, 1, 0],
    )
    write_theirs(tmp_path / "b", {"train": [text, text]})
    found = kept.load(tmp_path / "b", isolated=False)
    assert found is not None and found["train"][1].labels.tolist() == [5, 6]


def test_anything_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert kept.load(tmp_path / "a", isolated=False) is None
    (tmp_path / "a/notes.txt").write_text("x")
    with pytest.raises(DataError, match="holds something else than tokenised data sets"):
        kept.load(tmp_path / "a", isolated=False)
    (tmp_path / "a/train.npz").write_bytes(b"PK broken")
    with pytest.raises(DataError, match="train.npz is not a tokenised data set"):
        kept.load(tmp_path / "a", isolated=False)
    write_theirs(tmp_path / "b", {"validation": [{"input_ids": [1], "attention_mask": [1]}]})
    with pytest.raises(DataError, match="has no train split"):
        kept.load(tmp_path / "b", isolated=False)
    outside = '{"_data_files": [{"filename": "../../a/notes.txt"}]}'
    (tmp_path / "b/train").mkdir()
    for name, text in (
        ("dataset_dict.json", '{"splits": ["train"]}'),
        ("train/state.json", "[" * 100_000),
        ("train/state.json", outside),
    ):
        (tmp_path / "b" / name).write_text(text)
        with pytest.raises(DataError, match="cannot be read as LLaMA-Factory's"):
            kept.load(tmp_path / "b", isolated=False)


def test_a_disk_that_is_full_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def savez(stream: Any, **arrays: Any) -> None:
        stream.write(b"PK half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", savez)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        kept.save(tmp_path, {"train": SampleSet(iter([Row(input_ids=[1], labels=[1])]))})
    assert not list(tmp_path.iterdir())


def test_a_disk_that_does_not_take_them(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"tokenized_path: .*/file/sets cannot be written: Not a directory: free the disk, or name"
    ):
        kept.save(tmp_path / "file" / "sets", {"train": SampleSet(iter([Row(input_ids=[1], labels=[1])]))})
