"""The large files of one checkpoint on their way to the disk: several threads, each with a chunk of 64 MiB.

A thread gathers 4 MiB of its chunk in a buffer of its own, sums them while they are in its cache, and writes them past the page
cache; meanwhile other threads do the same, so the disk always has work and neither the copy nor the checksum is waited for.
Chunks are begun in the order in which files were given. Tensors are made by the thread that writes them (nearly always
views of planes), so nothing piles up in memory. The last thread of a file cuts it to its length and flushes it.
Measured: ``benchmarks/save.py``. Checked by ``tests/checkpoint/test_writer.py``.
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerferry.checkpoint import checksum
from layerferry.checkpoint.contents import FileToWrite
from layerferry.checkpoint.files import ALIGN_BYTES, Files
from layerferry.checkpoint.manifest import FileRecord
from layerferry.layout import round_up

THREADS = 4
BLOCK_BYTES = 1 << 22
"""Bytes that a thread gathers, sums and writes at a time: they stay in its cache in between."""

Bytes = NDArray[np.uint8]


class Countdown:
    """Calls ``then`` once, in the thread that counts last."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count, self._then, self._lock = count, then, threading.Lock()

    def one(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count:
                return
        self._then()


class Writing:
    """Files of one checkpoint. A context manager: leaving it waits for every thread, whatever has failed."""

    def __init__(self, files: Files, pool: ThreadPoolExecutor, moved: Callable[[int], None]) -> None:
        """``pool`` has ``THREADS`` threads; ``moved`` is told of bytes that the disk has taken, by any of them."""
        self._files, self._pool, self._moved = files, pool, moved
        self._lock = threading.Lock()
        self._jobs: list[Future[None]] = []
        self._open: set[int] = set()
        self._buffers: list[Bytes] = []
        self._records: dict[str, FileRecord] = {}
        self._error: BaseException | None = None

    def put(self, folder: Path, files: Sequence[FileToWrite], on_taken: Callable[[], None]) -> None:
        """Begin to write ``files``. ``on_taken`` is called, by some thread, once their tensors are no longer needed: also where
        writing has failed, but not where this call raises."""
        self._raise()
        outs = [_Out(file, self._create(folder / file.name)) for file in files]
        taken = Countdown(sum(out.num_chunks for out in outs), on_taken)
        for out in outs:
            whole = Countdown(out.num_chunks, lambda out=out: self._complete(out))  # type: ignore[misc]
            self._jobs += [self._pool.submit(self._run, out, number, taken, whole) for number in range(out.num_chunks)]

    def records(self) -> dict[str, FileRecord]:
        """Wait until everything is on the disk; sizes and checksums by file name. Raises what any thread has raised."""
        wait(self._jobs)
        self._raise()
        return self._records

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        wait(self._jobs)
        for descriptor in self._open:  # of files that were not completed
            with suppress(OSError):
                self._files.close(descriptor)

    # ---------------------------------------------------------------- in any thread

    def _create(self, path: Path) -> int:
        descriptor = self._files.create_large(path)
        with self._lock:
            self._open.add(descriptor)
        return descriptor

    def _run(self, out: _Out, number: int, taken: Countdown, whole: Countdown) -> None:
        """One chunk; after a failure anywhere nothing more is written, but everything is counted."""
        try:
            if self._error is None:
                self._write_chunk(out, number)
        except BaseException as error:  # kept, and raised where the checkpoint is waited for
            self._fail(error)
        for countdown in (taken, whole):
            try:
                countdown.one()
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_chunk(self, out: _Out, number: int) -> None:
        begin = number * checksum.CHUNK_BYTES
        end = min(begin + checksum.CHUNK_BYTES, out.num_bytes)
        buffer, total = self._buffer(), 0
        try:
            for position, filled in _blocks(out.parts(begin, end), buffer, begin):
                total = zlib.crc32(buffer[:filled].data, total)
                padded = round_up(filled, ALIGN_BYTES)
                buffer[filled:padded] = 0
                self._write(out.descriptor, buffer[:padded].data, position)
                self._moved(filled)
        finally:
            with self._lock:
                self._buffers.append(buffer)
        out.sums[number] = total

    def _write(self, descriptor: int, piece: memoryview, position: int) -> None:
        while piece:
            taken = self._files.write_at(descriptor, piece, position)
            piece, position = piece[taken:], position + taken

    def _complete(self, out: _Out) -> None:
        """Every chunk of the file has been written, or given up."""
        if self._error is not None:
            return
        if out.num_bytes % ALIGN_BYTES:
            self._files.truncate(out.descriptor, out.num_bytes)
        self._files.sync(out.descriptor)
        with self._lock:
            self._open.discard(out.descriptor)
        self._files.close(out.descriptor)
        self._records[out.file.name] = FileRecord(num_bytes=out.num_bytes, sums=tuple(out.sums))

    def _buffer(self) -> Bytes:
        with self._lock:
            if self._buffers:
                return self._buffers.pop()
        return np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), dtype=np.uint8)  # begins at a page


class _Out:
    """One file that is being written."""

    def __init__(self, file: FileToWrite, descriptor: int) -> None:
        self.file, self.descriptor, self.num_bytes = file, descriptor, file.num_bytes
        self.num_chunks = -(-file.num_bytes // checksum.CHUNK_BYTES)
        self.sums = [0] * self.num_chunks

    def parts(self, begin: int, end: int) -> Iterator[Bytes]:
        """The bytes from ``begin`` to ``end``, tensor by tensor."""
        header = np.frombuffer(self.file.header, dtype=np.uint8)
        if begin < len(header):
            yield header[begin:end]
        cursor = len(header)
        for tensor in self.file.tensors:
            low, high = max(begin - cursor, 0), min(end - cursor, tensor.num_bytes)
            if low < high:
                made = tensor.make()
                assert tuple(made.shape) == tuple(tensor.shape) and made.dtype == tensor.dtype, f"{tensor.name} has changed"
                yield _bytes(made)[low:high]
            cursor += tensor.num_bytes


def _blocks(parts: Iterator[Bytes], buffer: Bytes, position: int) -> Iterator[tuple[int, int]]:
    """Fill ``buffer`` with ``parts`` again and again: position in the file and bytes of each filling."""
    filled = 0
    for part in parts:
        while len(part):
            piece = part[: len(buffer) - filled]
            np.copyto(buffer[filled : filled + len(piece)], piece)
            filled += len(piece)
            part = part[len(piece) :]
            if filled == len(buffer):
                yield position, filled
                position, filled = position + filled, 0
    if filled:
        yield position, filled


def _bytes(tensor: Tensor) -> Bytes:
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat  # type: ignore[no-any-return]


def disk_threads() -> ThreadPoolExecutor:
    """The threads of a ``Writing``."""
    return ThreadPoolExecutor(max_workers=min(THREADS, len(os.sched_getaffinity(0)) + 1), thread_name_prefix="disk")
