"""Write safetensors shards, one tensor in memory at a time.

What for: an export of a model that fills most of the host memory must not need a second copy of it. Headers need only
names, shapes and dtypes, so they are written first, and then each tensor is made, written and dropped. Shards are cut
where ``save_pretrained`` cuts them, so file names and the index are the same.

Everything is written under temporary names in the same folder and flushed to the disk; only when all of it is there are the
files renamed, the index last, and shards of an earlier export removed. A failure before that leaves the folder as it was; one
between two renames says so.
Left out: config, tokenizer and the names (``models/saved_checkpoint.py``).
Checked by ``tests/store/test_safetensors_writer.py`` against the safetensors library.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from layerferry.errors import CheckpointError
from layerferry.plan import size_text
from layerferry.store.safetensors_file import DTYPES, INDEX_FILE, SINGLE_FILE, bytes_of

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class TensorToWrite(NamedTuple):
    """What a header needs, and how the tensor is made when its turn comes (any place; it is copied @host)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    block: str | None = None
    """Tensors with the same block stay in one shard: transformers never parts the experts that it split from one parameter."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCheckpoint:
    """Names of the files that were written, the index included where there is one, and the bytes of all tensors."""

    files: tuple[str, ...]
    total_bytes: int


def write_pretrained(
    folder: str | os.PathLike[str],
    tensors: Iterable[TensorToWrite | tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]],
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    total_parameters: int | None = None,
) -> WrittenCheckpoint:
    """Write ``tensors`` to ``folder`` as transformers would; ``metadata`` joins ``{"format": "pt"}`` in every header."""
    path = Path(folder)
    given = [TensorToWrite(*tensor) for tensor in tensors]
    _check_names(path, given)
    shards = split_into_shards(given, max_shard_bytes)
    names = _file_names(len(shards))
    headers = [header_of(shard, {"format": "pt", **(metadata or {})}) for shard in shards]
    total_bytes = sum(tensor.num_bytes for tensor in given)
    index = (INDEX_FILE,) if len(shards) > 1 else ()
    temporary = {name: path / f".{name}.tmp-{os.getpid()}" for name in (*names, *index)}
    num_renamed = 0
    try:
        path.mkdir(parents=True, exist_ok=True)
        _check_free_space(path, total_bytes + sum(map(len, headers)))
        for name, header, shard in zip(names, headers, shards, strict=True):
            _write_shard(temporary[name], header, shard)
        if index:
            _write_index(temporary[INDEX_FILE], names, shards, total_bytes, total_parameters)
        for name, file in temporary.items():
            file.replace(path / name)
            num_renamed += 1
        _remove_stale(path, frozenset(temporary))
        _flush_folder(path)
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        earlier = _earlier(num_renamed, len(temporary))
        raise CheckpointError(f"{path}: {reason}; the weights need {size_text(total_bytes)}. {earlier}.") from error
    finally:
        for file in temporary.values():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                file.unlink()
    return WrittenCheckpoint(files=tuple(temporary), total_bytes=total_bytes)


def split_into_shards(tensors: Iterable[TensorToWrite], max_shard_bytes: int) -> list[list[TensorToWrite]]:
    """Cut where ``save_pretrained`` does: blocks in order and greedily, but one above the bound has a shard of its own."""
    shards: list[list[TensorToWrite]] = []
    current: list[TensorToWrite] = []
    current_bytes = 0
    for block in _blocks(tensors):
        block_bytes = sum(tensor.num_bytes for tensor in block)
        if block_bytes > max_shard_bytes:
            shards.append(block)
            continue
        if current_bytes + block_bytes > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current = current + block
        current_bytes += block_bytes
    if current:
        shards.append(current)
    # Wide elements first, as in the library: every tensor is then aligned to its element, whatever is read in place.
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]


def _blocks(tensors: Iterable[TensorToWrite]) -> list[list[TensorToWrite]]:
    """Tensors of one block together, in the order of their first; the others alone."""
    blocks: dict[str, list[TensorToWrite]] = {}
    for tensor in tensors:
        blocks.setdefault(tensor.block or f"tensor {tensor.name}", []).append(tensor)
    return list(blocks.values())


def _file_names(num_shards: int) -> tuple[str, ...]:
    if num_shards == 1:
        return (SINGLE_FILE,)
    return tuple(f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1))


def _check_names(path: Path, tensors: list[TensorToWrite]) -> None:
    if not tensors:
        raise CheckpointError(f"{path}: there is no tensor to write.")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} is to be written twice.")
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} is {tensor.dtype}, which safetensors cannot hold.")
        seen.add(tensor.name)


def header_of(shard: Iterable[TensorToWrite], metadata: Mapping[str, str]) -> bytes:
    """A file's head: length and JSON, padded with spaces to a multiple of 8 bytes."""
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    cursor = 0
    for tensor in shard:
        end = cursor + tensor.num_bytes
        content[tensor.name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(content, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_free_space(path: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{path}: needs {size_text(needed_bytes)} on the disk, {size_text(free_bytes)} free: "
            f"{size_text(needed_bytes - free_bytes)} short. Free space, or write to another disk."
        )


def _write_shard(file: Path, header: bytes, shard: list[TensorToWrite]) -> None:
    with file.open("wb", buffering=0) as stream:
        _write_all(stream, memoryview(header))
        for tensor in shard:
            _write_tensor(stream, tensor)
        os.fsync(stream.fileno())


def _write_tensor(stream: BinaryIO, tensor: TensorToWrite) -> None:
    made = tensor.make().detach()
    if tuple(made.shape) != tuple(tensor.shape) or made.dtype != tensor.dtype:
        announced = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise CheckpointError(f"tensor {tensor.name!r} was announced as {announced}, made as {tuple(made.shape)} {made.dtype}.")
    flat = made.cpu().contiguous().reshape(-1).view(torch.uint8) if made.numel() else torch.empty(0, dtype=torch.uint8)
    _write_all(stream, bytes_of(flat))


def _write_all(stream: BinaryIO, view: memoryview) -> None:
    while view:
        view = view[stream.write(view) :]


def _write_index(
    file: Path, names: tuple[str, ...], shards: list[list[TensorToWrite]], total_bytes: int, total_parameters: int | None
) -> None:
    metadata = {"total_size": total_bytes} | ({} if total_parameters is None else {"total_parameters": total_parameters})
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    with file.open("wb", buffering=0) as stream:
        _write_all(stream, memoryview(text.encode("utf-8")))
        os.fsync(stream.fileno())


def _remove_stale(path: Path, names: frozenset[str]) -> None:
    """Weights of an earlier export: a leftover single file would be read in place of the new shards."""
    for file in path.iterdir():
        if file.name not in names and (file.name in (SINGLE_FILE, INDEX_FILE) or _SHARD.fullmatch(file.name)):
            file.unlink()


def _earlier(num_renamed: int, num_files: int) -> str:
    """What a failure has left of an earlier export."""
    if not num_renamed:
        return "Files of an earlier export are untouched"
    if num_renamed < num_files:
        return f"{num_renamed} of {num_files} files are new, the others of an earlier export, if there was one: write again"
    return "Every new file is there, but files of an earlier export may be too, or the disk may not have them yet: write again"


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
