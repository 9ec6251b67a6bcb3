"""``tokenized_path``: tokenised sets on disk, saved where there are none, else loaded whatever the other data keys say.

Our own are one ``.npz`` a set. Folders that LLaMA-Factory has saved (one Arrow folder a split) are read too, not written: its
``validation`` split is our ``eval``, ``validation_NAME`` is NAME, and the padding at the end of its packs is taken off.
Checked by ``tests/data/test_kept.py``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from layerferry.data import files
from layerferry.data.samples import Row, SampleSet
from layerferry.errors import DataError

TRAIN = "train"
THEIRS = "dataset_dict.json"
_PARTIAL = re.compile(r"\..+\.part-\d+")
"""What a run that is writing, or was killed at it, has there: nobody's sets yet."""
Sets = dict[str, SampleSet]
"""Training under ``train``, evaluation sets by name."""


def load(folder: Path, *, isolated: bool) -> Sets | None:
    """The sets in ``folder``, or None where it is empty or missing. ``isolated`` is told, since LLaMA-Factory's do not say."""
    if (folder / THEIRS).is_file():
        return _load_theirs(folder, isolated)
    if (folder / f"{TRAIN}.npz").is_file():
        return {file.stem: _load_set(file) for file in sorted(folder.glob("*.npz"))}
    if folder.exists() and (not folder.is_dir() or any(_PARTIAL.fullmatch(path.name) is None for path in folder.iterdir())):
        raise DataError(
            f"tokenized_path {folder} holds something else than tokenised data sets: name another folder, or empty it"
        )
    return None


def save(folder: Path, sets: Sets) -> None:
    partial = {name: folder / f".{name}.part-{os.getpid()}" for name in sets}  # another run may build the same sets
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in partial.items():
            path.unlink(missing_ok=True)
            with path.open("xb") as stream:
                np.savez(stream, **sets[name].state())
        for name in sorted(sets, key=lambda name: name == TRAIN):  # train last: its presence says that all are there
            partial[name].rename(folder / f"{name}.npz")
    except OSError as error:
        for path in partial.values():  # a disk that is full stays so otherwise
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise DataError(
            f"tokenized_path: {error.filename or folder} cannot be written: {error.strerror or error}: free the disk, or name "
            "another folder"
        ) from error


def _load_set(file: Path) -> SampleSet:
    try:
        with np.load(file) as arrays:
            return SampleSet.of_state(dict(arrays))
    except Exception as error:  # numpy's, zipfile's and pickle's own
        raise DataError(f"{file} is not a tokenised data set ({error}): remove {file.parent} to build it again") from None


def _load_theirs(folder: Path, isolated: bool) -> Sets:
    found: Sets = {}
    try:
        splits = json.loads((folder / THEIRS).read_text(encoding="utf-8"))["splits"]
        for split in splits:
            state = json.loads((folder / _own_name(split) / "state.json").read_text(encoding="utf-8"))
            members = [folder / split / _own_name(member["filename"]) for member in state["_data_files"]]
            name = {TRAIN: TRAIN, "validation": "eval"}.get(split, split.removeprefix("validation_"))
            found[name] = SampleSet(_their_rows(members), isolated=isolated)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"tokenized_path {folder} cannot be read as LLaMA-Factory's ({error!r}): build it again") from None
    if TRAIN not in found:
        raise DataError(f"tokenized_path {folder} has no train split")
    return found


def _own_name(name: str) -> str:
    """A name in a folder; ``ValueError`` where it leads elsewhere."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no name in this folder")
    return name


def _their_rows(members: list[Path]) -> Iterator[Row]:
    for member in members:
        for _, row in files.read(member):
            ids, positions = row["input_ids"], row.get("position_ids")
            real = len(ids)
            while real and row["attention_mask"][real - 1] == 0:
                real -= 1
            labels = row.get("labels", ids)
            yield Row(input_ids=ids[:real], labels=labels[:real], position_ids=None if positions is None else positions[:real])
