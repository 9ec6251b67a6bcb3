"""Read tensors of a Hugging Face folder, one at a time.

What for: a model is loaded parameter by parameter straight into its planes, so the reader must never hold more than the
tensor that was asked for. Why our own: ``safe_open`` maps whole files, and a mapped file that is shorter than its
header says kills the process with SIGBUS instead of an error. Here every header is checked against the size of its
file before the first tensor is read, and bytes come through ``preadv``, which releases the GIL and cannot fault.

The rules for a header are those of the safetensors library: offsets without overlaps or holes, ending exactly at the end
of the file. Pickled checkpoints are refused: reading one can run code. Left out: what the names mean
(``models/parameter_source.py``) and quantised formats (``store/dequantise.py``).
Checked by ``tests/store/test_safetensors_file.py`` against the safetensors library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from layerferry.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Element types of the safetensors format, by their names in a header."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own bound: a larger length means that the file is something else."""

_READ_BYTES = 1 << 30
"""Linux transfers at most 2 GiB - 4 KiB in one call."""


class TensorFolder(Protocol):
    """Named tensors that are read one at a time: a checkpoint folder, or one seen through dequantisation."""

    @property
    def path(self) -> Path: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> Tensor: ...

    def where(self, name: str) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file: ``begin`` is the absolute position of its first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    begin: int
    num_bytes: int


class CheckpointFolder:
    """The safetensors weights of a folder (one ``model.safetensors``, or an index with shards), or one ``.safetensors`` file.

    Every header is read and checked on construction; no file stays open, so reads may come from any thread.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        entries: dict[str, TensorEntry] = {}
        files, promised = _weight_files(self.path)
        for file in files:
            for entry in read_header(file):
                if entry.name in entries:
                    both = f"{entries[entry.name].file.name} and {file.name}"
                    raise CheckpointError(f"{self.path}: tensor {entry.name!r} is in both {both}; keep one of them.")
                entries[entry.name] = entry
        for name, file_name in promised.items():
            if name not in entries or entries[name].file.name != file_name:
                index = self.path / INDEX_FILE
                raise CheckpointError(f"{index}: tensor {name!r} is said to be in {file_name}, whose header does not have it.")
        self._entries = entries

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor {name!r} among its {len(self._entries)}.") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entry(name).dtype

    def where(self, name: str) -> Path:
        """The file that holds ``name``, for messages."""
        return self.entry(name).file

    def read(self, name: str) -> Tensor:
        """The tensor, in memory of its own @host, in the dtype of the file."""
        entry = self.entry(name)
        return _read_bytes(entry).view(entry.dtype).view(entry.shape)


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one file in the order of their bytes; the header must agree with itself and with the file's size."""
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > file_bytes:
                found = f"{file_bytes} bytes, header of {header_bytes}"
                raise CheckpointError(f"{file}: {found}: truncated or no safetensors file.")
            text = stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}.") from error
    header = _parse_json(file, text)
    header.pop("__metadata__", None)
    data_begin = 8 + header_bytes
    entries = [_entry(file, name, value, data_begin) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.num_bytes))
    cursor = data_begin
    for entry in entries:
        if entry.begin != cursor:
            kind = "overlaps another tensor" if entry.begin < cursor else "leaves a gap before it"
            raise CheckpointError(f"{file}: tensor {entry.name!r} begins at byte {entry.begin}, expected {cursor}: it {kind}.")
        cursor += entry.num_bytes
        if cursor > file_bytes:
            raise CheckpointError(
                f"{file}: truncated: tensor {entry.name!r} ends at byte {cursor}, the file has {file_bytes}. Download it again."
            )
    if cursor != file_bytes:
        raise CheckpointError(f"{file}: {file_bytes} bytes, but its header accounts for {cursor}.")
    return entries


def _entry(file: Path, name: str, value: object, data_begin: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: header entry {name!r} is not an object.")
    dtype_name, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(f"{file}: tensor {name!r} has unknown dtype {dtype_name!r}; known: {', '.join(DTYPES)}.")
    if not _is_counts(shape):
        raise CheckpointError(f"{file}: tensor {name!r} has the shape {shape!r}.")
    if not _is_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{file}: tensor {name!r} has the data_offsets {offsets!r}.")
    num_bytes = prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != num_bytes:
        given = offsets[1] - offsets[0]
        raise CheckpointError(
            f"{file}: tensor {name!r}, {dtype_name} {shape}, needs {num_bytes} bytes, its offsets give {given}."
        )
    begin = data_begin + offsets[0]
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), file=file, begin=begin, num_bytes=num_bytes)


def _is_counts(value: object) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of whole numbers, none negative or beyond 64 bits (JSON's true is no number)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files as transformers chooses them (the single file before an index), and the index's promises."""
    if path.is_file() and path.suffix == ".safetensors":
        return [path], {}
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a folder with config.json and {SINGLE_FILE}.")
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.is_file():
        return [single], {}
    if not index.is_file():
        raise CheckpointError(_nothing_found(path))
    promised = _weight_map(index)
    files = sorted(set(promised.values()))
    missing = [name for name in files if not (path / name).is_file()]
    if missing:
        counts = f"{len(missing)} of {len(files)}"
        raise CheckpointError(f"{index}: {counts} shards are missing: {', '.join(missing[:5])}. Download them.")
    return [path / name for name in files], promised


def _nothing_found(path: Path) -> str:
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.bin.index.json") for file in path.glob(pattern))
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        return f"{path}: {len(shards)} safetensors files ({shards[0]} ...) but neither {SINGLE_FILE} nor {INDEX_FILE}."
    if pickled:
        return (
            f"{path}: only pickled weights ({pickled[0]}), which can run code when read. If you trust them, convert them: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
        )
    return f"{path}: no {SINGLE_FILE} or {INDEX_FILE}."


def _weight_map(index: Path) -> dict[str, str]:
    try:
        text = index.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}.") from error
    weight_map = _parse_json(index, text).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index}: tensor {name!r} is said to be in {file!r}: no .safetensors file of this folder.")
    return weight_map


def _parse_json(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{file}: {twice!r} occurs twice.")
        return result

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: malformed JSON: {str(error)[:200]}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: malformed JSON: an object is expected, found {type(value).__name__}.")
    return value


def _read_bytes(entry: TensorEntry) -> Tensor:
    """The bytes of one tensor: uint8 [entry.num_bytes] @host, not pinned."""
    buffer = torch.empty(entry.num_bytes, dtype=torch.uint8)
    try:
        descriptor = os.open(entry.file, os.O_RDONLY)
        try:
            position = 0
            for piece in _pieces(bytes_of(buffer)):
                while piece:
                    done = os.preadv(descriptor, [piece], entry.begin + position)
                    if done == 0:
                        raise CheckpointError(f"{entry.file}: ended inside tensor {entry.name!r}: it changed while it was read.")
                    position += done
                    piece = piece[done:]
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{entry.file}: tensor {entry.name!r} cannot be read: {error.strerror}.") from error
    return buffer


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of a contiguous uint8 vector @host, for reading into and writing from."""
    assert flat.dtype == torch.uint8 and flat.is_contiguous()
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that an array is a buffer


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), _READ_BYTES):
        yield view[start : start + _READ_BYTES]
