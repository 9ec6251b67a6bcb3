"""CRC-32 of a file in chunks: cheap enough to be always on, and it names the damaged place.

A CRC finds every burst of up to 32 flipped bits and misses others with chance 2**-32 a chunk; it is no defence against
an enemy, who could rewrite the manifest too. zlib does 1.5 to 2 GB/s a core; several threads sum what they write
(``writer``) and what they verify, so that the disk stays the limit. Checked by ``tests/checkpoint/test_checksum.py``.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK_BYTES = 1 << 26
READ_BYTES = 1 << 22


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
