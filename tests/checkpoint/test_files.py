"""The disk's primitives where they promise something: umask, replacement, reasons."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from layerferry.checkpoint.files import Files, reason_of, replace_file, write_file


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_the_umask_decides(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Files().make_folder(tmp_path / "folder")
        write_file(Files(), tmp_path / "folder" / "file", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o777 & ~umask
    assert (tmp_path / "folder" / "file").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_is_never_half_replaced(tmp_path: Path) -> None:
    class Full(Files):
        def write(self, descriptor: int, piece: memoryview) -> int:
            raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "latest"
    replace_file(Files(), path, b"old")
    with pytest.raises(OSError):
        replace_file(Full(), path, b"new")
    assert path.read_bytes() == b"old"
    replace_file(Files(), path, b"new")
    assert path.read_bytes() == b"new" and [item.name for item in tmp_path.iterdir()] == ["latest"]


def test_an_existing_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "file").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        write_file(Files(), tmp_path / "file", b"x")
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_removing_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    Files().remove(tmp_path / "link")
    Files().remove(tmp_path / "nothing")
    assert (tmp_path / "folder" / "file").exists() and not (tmp_path / "link").is_symlink()


def test_reasons_name_a_remedy() -> None:
    assert "save_total_limit" in reason_of(OSError(errno.ENOSPC, "No space left on device"))
    assert "read-only" in reason_of(OSError(errno.EROFS, ""))
    assert reason_of(OSError(errno.ENOTDIR, "Not a directory")) == "Not a directory"
