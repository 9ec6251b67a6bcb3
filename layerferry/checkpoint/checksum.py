"""CRC-32 of a file in chunks: cheap enough to be always on, and it names the damaged place.

A CRC finds every burst of up to 32 flipped bits and misses others with chance 2**-32 a chunk; it is no defence against
an enemy, who could rewrite the manifest too. zlib does 1.5 GB/s a core here; while a piece is written another thread sums it,
and a file is verified by several threads, so that the disk stays the limit. Checked by ``tests/checkpoint/test_checksum.py``.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from layerferry.checkpoint.files import Files, write_all

CHUNK_BYTES = 1 << 26
READ_BYTES = 1 << 22
INLINE_BYTES = 1 << 16
"""Below this a second thread costs more than it saves."""


class SummedFile:
    """A new file that is summed while it is written. A context manager; only its maker writes."""

    def __init__(self, files: Files, path: Path, adder: ThreadPoolExecutor) -> None:
        self._files, self._adder = files, adder
        self._descriptor = files.create(path)
        self._sums: list[int] = []
        self._open_sum = 0
        self.num_bytes = 0

    def write(self, view: memoryview) -> None:
        """Append the bytes of ``view``, which must not change meanwhile."""
        while view:
            piece = view[: CHUNK_BYTES - self.num_bytes % CHUNK_BYTES]
            if len(piece) < INLINE_BYTES:
                write_all(self._files, self._descriptor, piece)
                self._open_sum = zlib.crc32(piece, self._open_sum)
            else:
                summed: Future[int] = self._adder.submit(zlib.crc32, piece, self._open_sum)
                try:
                    write_all(self._files, self._descriptor, piece)
                finally:
                    self._open_sum = summed.result()
            self.num_bytes += len(piece)
            if self.num_bytes % CHUNK_BYTES == 0:
                self._sums.append(self._open_sum)
                self._open_sum = 0
            view = view[len(piece) :]

    def sync(self) -> None:
        self._files.sync(self._descriptor)

    @property
    def sums(self) -> tuple[int, ...]:
        """One CRC-32 a chunk."""
        return (*self._sums, self._open_sum) if self.num_bytes % CHUNK_BYTES else tuple(self._sums)

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close(self._descriptor)


def sums_of(content: bytes) -> tuple[int, ...]:
    """The checksums of a file with this content."""
    return tuple(zlib.crc32(content[start : start + CHUNK_BYTES]) for start in range(0, len(content), CHUNK_BYTES))


def damaged_chunk(path: Path, expected: tuple[int, ...], pool: ThreadPoolExecutor) -> int | None:
    """Number of the first chunk of the file that is not as summed; None: all are. Memory: 4 MiB a thread."""
    sums = pool.map(lambda number: _chunk_sum(path, number), range(len(expected)))
    for number, (found, wanted) in enumerate(zip(sums, expected, strict=True)):
        if found != wanted:
            return number
    return None


def _chunk_sum(path: Path, number: int) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        total, position, end = 0, number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES
        while position < end and (piece := os.pread(descriptor, min(READ_BYTES, end - position), position)):
            total = zlib.crc32(piece, total)
            position += len(piece)
        return total
    finally:
        os.close(descriptor)
