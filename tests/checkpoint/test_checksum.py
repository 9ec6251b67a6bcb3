"""Sums equal zlib's over each chunk, and a changed byte is found in its chunk."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layerferry.checkpoint import checksum
from layerferry.checkpoint.checksum import damaged_chunk, sums_of


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(checksum, "READ_BYTES", 1000)


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 50_000])
def test_sums_are_those_of_zlib(tmp_path: Path, num_bytes: int) -> None:
    content = random.Random(num_bytes).randbytes(num_bytes)
    expected = tuple(zlib.crc32(content[i : i + 4096]) for i in range(0, num_bytes, 4096))
    path = tmp_path / "file"
    path.write_bytes(content)
    assert sums_of(content) == expected
    with ThreadPoolExecutor(2) as pool:
        assert damaged_chunk(path, expected, pool) is None
        for position in {0, num_bytes // 2, num_bytes - 1} if num_bytes else ():
            damaged = bytearray(content)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            assert damaged_chunk(path, expected, pool) == position // 4096
