"""The file without a name: what is written comes back, nothing is left behind, and the page cache is passed by."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from layerferry.errors import ConfigError
from layerferry.store.scratch import ALIGN_BYTES, ScratchFile, check_folder, is_memory


def page(fill: int, blocks: int = 1) -> memoryview:
    memory = mmap.mmap(-1, blocks * ALIGN_BYTES)
    memory[:] = bytes([fill]) * (blocks * ALIGN_BYTES)
    return memoryview(memory)


def test_what_is_written_comes_back_and_the_folder_stays_empty(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    file = ScratchFile(folder)
    file.open(4 * ALIGN_BYTES)
    assert os.fstat(file.descriptor).st_size == 4 * ALIGN_BYTES and os.fstat(file.descriptor).st_blocks * 512 >= 4 * ALIGN_BYTES
    assert list(folder.iterdir()) == []
    file.write_at(page(7, 2), ALIGN_BYTES)
    found = page(0, 4)
    file.read_at(found, 0)
    assert bytes(found) == bytes(ALIGN_BYTES) + bytes([7]) * (2 * ALIGN_BYTES) + bytes(ALIGN_BYTES)
    file.close()
    file.close()


@pytest.mark.parametrize("when", ["flag", "transfer"])
def test_a_file_system_without_direct_transfers_is_used_through_the_cache(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some refuse the flag, some the first transfer: then every write is flushed."""
    flushed: list[int] = []
    real_fcntl, real_write, real_flush = fcntl.fcntl, os.pwrite, os.fdatasync

    def refuses_flag(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_fcntl(descriptor, command, argument)

    def refuses_write(descriptor: int, piece: Any, position: int) -> int:
        if real_fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_write(descriptor, piece, position)

    def flush(descriptor: int) -> None:
        flushed.append(descriptor)
        real_flush(descriptor)

    if when == "flag":
        monkeypatch.setattr(fcntl, "fcntl", refuses_flag)
    monkeypatch.setattr(os, "pwrite", refuses_write)
    monkeypatch.setattr(os, "fdatasync", flush)
    file = ScratchFile(tmp_path)
    file.open(2 * ALIGN_BYTES)
    file.write_at(page(3), ALIGN_BYTES)
    found = page(0)
    file.read_at(found, ALIGN_BYTES)
    assert bytes(found) == bytes(page(3)) and flushed == [file.descriptor]
    file.close()


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    file.open(ALIGN_BYTES)
    with pytest.raises(OSError, match=f"ends at byte {ALIGN_BYTES}"):
        file.read_at(page(0, 2), 0)
    file.close()


def test_free_bytes_are_those_of_the_next_folder_that_is_there(tmp_path: Path) -> None:
    assert ScratchFile(tmp_path / "not" / "yet").free_bytes() > 0


@pytest.mark.parametrize("name", ["/dev/null", "file", "file/x", "dangling", "dangling/x"])
def test_a_place_that_is_no_folder_is_found_before_anything_starts(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    there = Path("/dev/null") if name == "/dev/null" else tmp_path / name.split("/")[0]
    with pytest.raises(ConfigError, match=f"^disk_folder: {tmp_path / name}: {there} is no folder: name one on the disk"):
        check_folder(tmp_path / name)


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(tmp_path / "made" / "later")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root everything may
    with pytest.raises(ConfigError, match=f"{tmp_path} may not be written: check its owner"):
        check_folder(tmp_path / "made")


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ramfs", True), ("ext4", False)])
def test_a_disk_that_is_memory(tmp_path: Path, kind: str, expected: bool) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    own = f"25 24 {os.major(device)}:{os.minor(device)} / {tmp_path} rw,relatime shared:1 - {kind} none rw"
    mounts.write_text(f"24 27 999:6 / /dev/other rw - tmpfs none rw\nbroken\n{own}\n")
    assert is_memory(tmp_path / "made" / "later", mounts) is expected
    assert not is_memory(tmp_path, tmp_path / "nowhere")
