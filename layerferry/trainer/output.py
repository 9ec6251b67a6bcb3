"""The output folder as a run sees it: the one way for its files to get there, each of them whole.

``files`` decide what may be written at all: those of a run that has locked the folder (``checkpoint/lock.py``) make nothing where
the folder was moved and another, perhaps its successor's, stands in its place. Checkpoints go through the same ``files``
(``checkpoint/save.py``); only trackers write by themselves (``reporters``). A small file is replaced. What is large, or written
by others, is written into a hidden folder inside, on the same file system, and moved at the end.
Checked by ``tests/trainer/test_output.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from layerferry.checkpoint.files import Files, replace_file, write_all
from layerferry.checkpoint.folders import PARTIAL
from layerferry.store.safetensors_file import INDEX_FILE, SINGLE_FILE

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class OutputFolder:
    """``path``, and ``files`` to write there with. Every method raises ``OSError`` where the disk, or the lock, says no."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self.path, self.files = path, files or Files()

    def write(self, name: str, content: bytes) -> None:
        """The file is the old one or the new one, whole."""
        replace_file(self.files, self.path / name, content)

    def write_json(self, name: str, value: Mapping[str, Any], *, sort_keys: bool = False) -> None:
        self.write(name, json_text(value, sort_keys=sort_keys).encode("utf-8"))

    def append(self, name: str, text: str) -> None:
        """Behind what is there; not flushed."""
        descriptor = self.files.open_to_append(self.path / name)
        try:
            write_all(self.files, descriptor, memoryview(text.encode("utf-8")))
        finally:
            self.files.close(descriptor)

    def remove(self, name: str) -> None:
        self.files.remove(self.path / name)

    @contextmanager
    def beside(self) -> Iterator[Path]:
        """A new folder next to this one, for what is lost otherwise where this one is gone; nothing stays of it on an error."""
        for number in itertools.count(1):
            work = self.path.with_name(f"{self.path.name}-rescued-{number}")
            with suppress(FileExistsError):
                work.mkdir()
                break
        try:
            yield work
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise

    @contextmanager
    def filling(self) -> Iterator[Path]:
        """A folder to fill whose files are moved here when all went well.

        What tells readers which weights there are (one file, or an index) is moved last, and where shards come an earlier one
        goes first: a kill in between leaves a folder that says it has no model, never one that loads half of another. Weights of
        an earlier run that the new ones do not replace are removed: transformers would take a single file before an index.
        """
        self.files.check()
        work = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=self.path))
        try:
            yield work
            self.files.check()
            new = sorted(path.name for path in work.iterdir())
            stale = [path.name for path in sorted(self.path.iterdir()) if _is_model(path.name) and path.name not in new]
            doors = [name for name in (INDEX_FILE, SINGLE_FILE) if name in new]
            if INDEX_FILE in doors:
                self.remove(INDEX_FILE)
                self.remove(SINGLE_FILE)
            for name in (*(name for name in new if name not in doors), *doors):
                self.files.rename(work / name, self.path / name)
            for name in stale if doors else ():
                self.remove(name)
            self.files.sync_folder(self.path)
        finally:
            with suppress(OSError):
                self.files.remove(work)


def _is_model(name: str) -> bool:
    return name in (INDEX_FILE, SINGLE_FILE) or _SHARD.fullmatch(name) is not None


def json_text(value: Mapping[str, Any], *, sort_keys: bool = False) -> str:
    """``value`` as JSON, with null for numbers that are not finite."""
    return json.dumps(_finite(value), indent=2, sort_keys=sort_keys) + "\n"


def json_line(value: Mapping[str, Any]) -> str:
    """``json_text`` on one line."""
    return json.dumps(_finite(value)) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
