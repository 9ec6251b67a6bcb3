"""Sums equal zlib's over each chunk, however the bytes come, and a changed byte is found in its chunk."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layerferry.checkpoint import checksum
from layerferry.checkpoint.checksum import SummedFile, damaged_chunk, sums_of
from layerferry.checkpoint.files import Files


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(checksum, "READ_BYTES", 1000)
    monkeypatch.setattr(checksum, "INLINE_BYTES", 1 << 9)


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 50_000])
def test_sums_are_those_of_zlib(tmp_path: Path, num_bytes: int) -> None:
    content = random.Random(num_bytes).randbytes(num_bytes)
    expected = tuple(zlib.crc32(content[i : i + 4096]) for i in range(0, num_bytes, 4096))
    path = tmp_path / "file"
    with ThreadPoolExecutor(1) as adder, SummedFile(Files(), path, adder) as out:
        position = 0
        for size in (1, 100, 5000, 600, 10**6):
            out.write(memoryview(content)[position : position + size])
            position += size
        out.sync()
        assert (out.num_bytes, out.sums) == (num_bytes, expected)
    assert path.read_bytes() == content and sums_of(content) == expected
    with ThreadPoolExecutor(2) as pool:
        assert damaged_chunk(path, expected, pool) is None
        for position in {0, num_bytes // 2, num_bytes - 1} if num_bytes else ():
            damaged = bytearray(content)
            damaged[position] ^= 0x10
            path.write_bytes(damaged)
            assert damaged_chunk(path, expected, pool) == position // 4096


def test_short_writes(tmp_path: Path) -> None:
    class Stingy(Files):
        def write(self, descriptor: int, piece: memoryview) -> int:
            return super().write(descriptor, piece[:7])

    content = bytes(range(256)) * 20
    with ThreadPoolExecutor(1) as adder, SummedFile(Stingy(), tmp_path / "file", adder) as out:
        out.write(memoryview(content))
        assert out.sums == sums_of(content)
    assert (tmp_path / "file").read_bytes() == content
