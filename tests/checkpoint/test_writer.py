"""Files that several threads write have the bytes and sums that were given, past the page cache and through it; what fails in a
thread reaches whoever waits, and every file's memory is given back once."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.checkpoint import checksum, writer
from layerferry.checkpoint.contents import FileToWrite
from layerferry.checkpoint.files import Files
from layerferry.checkpoint.writer import Countdown, Writing, disk_threads
from layerferry.store.safetensors_file import CheckpointFolder
from layerferry.store.safetensors_writer import TensorToWrite, header_of
from tests.checkpoint.faults import BreakingFiles, Killed, QuickFiles

CHUNK = 1 << 15


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(writer, "BLOCK_BYTES", 1 << 13)


def file_of(name: str, shapes: list[tuple[int, ...]], seed: int = 0) -> tuple[FileToWrite, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{number}": torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    given = [TensorToWrite(key, tuple(value.shape), value.dtype, lambda value=value: value) for key, value in tensors.items()]
    return FileToWrite(name=name, header=header_of(given, {"format": "pt"}), tensors=tuple(given)), tensors


def write(folder: Path, files: Files, given: list[FileToWrite]) -> tuple[dict[str, Any], list[str]]:
    """The records, and the names of files in the order in which their tensors were let go."""
    gone: list[str] = []
    with disk_threads() as threads, Writing(files, threads, lambda _: None) as writing:
        for file in given:
            writing.put(folder, [file], lambda name=file.name: gone.append(name))  # type: ignore[misc]
        return writing.records(), gone


class Stingy(QuickFiles):
    """Takes as little as it likes, at odd lengths."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def write_at(self, descriptor: int, piece: memoryview, position: int) -> int:
        return super().write_at(descriptor, piece[: self._random.randrange(1, 5000)], position)


def check_bytes_and_sums(folder: Path, files: Files) -> None:
    """Tensors below and above a block and a chunk, an empty one, and lengths that are no multiple of anything."""
    shapes: list[list[tuple[int, ...]]] = [[(3,), (0, 4), (1,)], [(100, 301), (7,), (2, 2048)], [(8192 * 5 + 1,)], [(1,)] * 40]
    made = [file_of(f"file-{number}.safetensors", some, number) for number, some in enumerate(shapes)]
    records, gone = write(folder, files, [file for file, _ in made])
    assert sorted(gone) == [file.name for file, _ in made]
    for file, tensors in made:
        content = (folder / file.name).read_bytes()
        assert len(content) == file.num_bytes == records[file.name].num_bytes
        assert records[file.name].sums == tuple(zlib.crc32(content[i : i + CHUNK]) for i in range(0, len(content), CHUNK))
        found = CheckpointFolder(folder / file.name)
        assert all(torch.equal(found.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("files", [Files(), QuickFiles(), Stingy()])
def test_bytes_and_sums(tmp_path: Path, files: Files) -> None:
    check_bytes_and_sums(tmp_path, files)


def test_a_file_system_that_opens_for_direct_writes_and_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.pwrite, []

    def refusing(descriptor: int, piece: memoryview, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(position)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, piece, position)

    monkeypatch.setattr(os, "pwrite", refusing)
    check_bytes_and_sums(tmp_path, Files())
    assert refused


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.open, []

    def refusing(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            os.close(real(path, flags & ~os.O_DIRECT, *more))  # ext4 in some modes leaves the file behind
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    file, tensors = file_of("file.safetensors", [(40_000,)])
    write(tmp_path, Files(), [file])
    assert refused and torch.equal(CheckpointFolder(tmp_path / file.name).read("t0"), tensors["t0"])


@pytest.mark.parametrize("at", range(0, 40, 3))
@pytest.mark.parametrize("fault", [errno.ENOSPC, "kill"])
def test_a_failure_reaches_the_caller_and_everything_is_given_back(tmp_path: Path, at: int, fault: int | str) -> None:
    given = [file_of(f"file-{number}", [(20_000,)], number)[0] for number in range(3)]
    gone: list[int] = []
    put = 0
    files = BreakingFiles(at, fault)
    raised = None
    try:
        with disk_threads() as threads, Writing(files, threads, lambda _: None) as writing:
            for number, file in enumerate(given):
                writing.put(tmp_path, [file], lambda number=number: gone.append(number))  # type: ignore[misc]
                put += 1
            writing.records()
    except (OSError, Killed) as error:
        raised = error
    assert (raised is None) == (fault == errno.ENOSPC and files.names[at] == "close")  # which never fails
    assert sorted(gone) == list(range(put))


def test_files_are_begun_in_order(tmp_path: Path) -> None:
    """One thread at a time: what was given first is let go first."""
    made = [file_of(f"file-{number}", [(30_000,)], number)[0] for number in range(5)]
    gone: list[str] = []
    with ThreadPoolExecutor(1) as threads, Writing(QuickFiles(), threads, lambda _: None) as writing:
        for file in made:
            writing.put(tmp_path, [file], lambda name=file.name: gone.append(name))  # type: ignore[misc]
        writing.records()
    assert gone == [file.name for file in made]


def test_countdown_calls_once() -> None:
    calls: list[int] = []
    countdown = Countdown(50, lambda: calls.append(threading.get_ident()))
    threads = [threading.Thread(target=lambda: [countdown.one() for _ in range(10)]) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
