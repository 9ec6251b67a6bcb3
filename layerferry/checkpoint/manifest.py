"""``manifest.json``: every file of a checkpoint with its size and checksums, and what a reader must know before it starts.

It is written last, so a folder with a manifest is whole unless something has damaged it since; and it sums itself, so that a
damaged manifest is found too. It is data from outside: every value is checked, and a file's name must be a name in the
folder, not a path. Left out: names and shapes of tensors, which the files' own headers say.
Checked by ``tests/checkpoint/test_manifest.py``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerferry.checkpoint.checksum import CHUNK_BYTES, damaged_chunk
from layerferry.checkpoint.files import read_small, reason_of
from layerferry.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2
MAX_MANIFEST_BYTES = 1 << 28

_NAME = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,200}")
_RUN = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file: its bytes, and one CRC-32 for each chunk of ``CHUNK_BYTES``."""

    num_bytes: int
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    run: str
    """The run that wrote it: one process, from its start to its end."""
    line: tuple[tuple[str, int], ...] = ()
    """The runs before that one, oldest first, each with the step at which it was left: where this checkpoint comes from."""
    step: int
    resumable: bool
    """False: the model only (``save_only_model``)."""
    state_planes: Mapping[str, str]
    """The optimizer's planes, name to element type as safetensors calls it."""
    trained: tuple[str, ...] | None
    """Names of the trained parameters; None: written before they were recorded."""
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "run": self.run,
            "line": [list(one) for one in self.line],
            "step": self.step,
            "resumable": self.resumable,
            "state_planes": dict(self.state_planes),
            "trained": None if self.trained is None else list(self.trained),
            "chunk_bytes": CHUNK_BYTES,
            "files": {name: {"bytes": one.num_bytes, "crc32": list(one.sums)} for name, one in sorted(self.files.items())},
            "versions": dict(self.versions),
        }
        return (json.dumps({**body, "crc32": _sum(body)}, indent=1) + "\n").encode("utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of ``folder``; ``CheckpointError`` where it is missing, damaged, or of another format."""
        path = folder / MANIFEST
        try:
            text = read_small(path, MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: no {MANIFEST}: no checkpoint of ours, or one never finished") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {reason_of(error)}") from error
        try:
            return cls.parse(json.loads(text.decode("utf-8")), path)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged: {str(error)[:200]}") from error

    @classmethod
    def parse(cls, value: Any, path: Path) -> Manifest:
        """Check a parsed manifest; ``path`` is for messages."""
        if not isinstance(value, dict) or "format" not in value:
            raise CheckpointError(f"{path}: not a manifest of LayerFerry")
        if value["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: format {str(value['format'])[:20]!r}, of another version of LayerFerry; this one reads {FORMAT}: "
                "go on with that version, or start anew from the weights (model_name_or_path)"
            )
        body = {key: item for key, item in value.items() if key != "crc32"}
        if value.get("crc32") != _sum(body):
            raise CheckpointError(f"{path}: damaged: its checksum does not fit its content")
        wrong = _first_wrong(body)
        if wrong is not None:
            raise CheckpointError(f"{path}: {wrong} is not as this version writes it")
        files = {name: FileRecord(num_bytes=one["bytes"], sums=tuple(one["crc32"])) for name, one in body["files"].items()}
        return cls(
            run=body["run"],
            line=tuple((run, step) for run, step in body["line"]),
            step=body["step"],
            resumable=body["resumable"],
            state_planes=body["state_planes"],
            trained=None if body.get("trained") is None else tuple(body["trained"]),
            files=files,
            versions=body["versions"],
        )

    def check_sizes(self, folder: Path) -> None:
        """Every file is there with its size: what truncation and deletion show at once."""
        for name, record in self.files.items():
            path = folder / name
            try:
                found = path.lstat()
            except OSError as error:
                raise CheckpointError(f"{path}: missing, or not readable: {error.strerror}") from error
            if path.is_symlink():  # as in the Hugging Face hub's cache
                raise CheckpointError(
                    f"{path}: a link, and links are not followed: copy the folder with `cp -rL {folder} COPY`, and name the copy "
                    "as resume_from_checkpoint"
                )
            if not path.is_file():
                raise CheckpointError(f"{path}: not a file of its own")
            if found.st_size != record.num_bytes:
                raise CheckpointError(f"{path}: {found.st_size} bytes, written were {record.num_bytes}: truncated or foreign")

    def check_file(self, folder: Path, name: str, pool: ThreadPoolExecutor) -> None:
        """Every byte of one file is as it was written."""
        try:
            chunk = damaged_chunk(folder / name, self.files[name].sums, pool)
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {reason_of(error)}") from error
        if chunk is not None:
            begin = chunk * CHUNK_BYTES
            raise CheckpointError(f"{folder / name}: damaged within {CHUNK_BYTES >> 20} MiB from byte {begin}")

    def check(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        """Everything: sizes first, then every byte."""
        self.check_sizes(folder)
        for name in self.files:
            self.check_file(folder, name, pool)


def _sum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode("utf-8"))


def _first_wrong(body: Mapping[str, Any]) -> str | None:
    """The first key whose value cannot be right."""
    checks = {
        "run": _is_run,
        "line": is_line,
        "step": _is_count,
        "resumable": lambda v: isinstance(v, bool),
        "state_planes": _is_texts,
        "trained": lambda v: v is None or (isinstance(v, list) and all(isinstance(name, str) for name in v)),
        "chunk_bytes": lambda v: v == CHUNK_BYTES,
        "files": lambda v: isinstance(v, dict) and all(_NAME.fullmatch(name) and _is_record(one) for name, one in v.items()),
        "versions": _is_texts,
    }
    return next((key for key, is_right in checks.items() if not is_right(body.get(key))), None)


def is_line(value: object) -> bool:
    """Whether ``value`` is a ``Manifest.line`` as JSON gives it."""
    return isinstance(value, list) and all(
        isinstance(one, list) and len(one) == 2 and _is_run(one[0]) and _is_count(one[1]) for one in value
    )


def _is_run(value: object) -> bool:
    return isinstance(value, str) and _RUN.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _is_record(value: object) -> bool:
    if not isinstance(value, dict) or set(value) != {"bytes", "crc32"} or not _is_count(value["bytes"]):
        return False
    sums = value["crc32"]
    right_length = isinstance(sums, list) and len(sums) == -(-value["bytes"] // CHUNK_BYTES)
    return right_length and all(type(one) is int and 0 <= one < 2**32 for one in sums)
