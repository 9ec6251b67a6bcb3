"""One run a folder: refused while the owner lives, free the moment it is dead, and gone without a trace."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from layerferry.checkpoint.lock import LOCK, FolderLock, FolderMoved
from layerferry.errors import ConfigError

HOLDER = "import sys, pathlib, time; from layerferry.checkpoint.lock import FolderLock\n"
HOLDER += "lock = FolderLock(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"


def test_the_second_is_refused_and_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by process {owner.pid} on {socket.gethostname()}, since 20"):
            FolderLock(tmp_path)
        owner.send_signal(signal.SIGKILL)
    finally:
        owner.kill()
        owner.wait()
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_taken_away_again(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with FolderLock(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "result").write_text("")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["result"]


@pytest.mark.parametrize(
    ("owner", "is_free"),
    [
        ({"pid": 1, "host": socket.gethostname(), "since": "then"}, False),
        ({"pid": 2**22 + 1, "host": socket.gethostname(), "since": "then"}, True),
        ({"pid": 2**22 + 1, "host": "elsewhere", "since": "then"}, False),
        ({}, True),
    ],
)
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: dict[str, object], is_free: bool
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / LOCK).write_text(json.dumps(owner))
    if is_free:
        FolderLock(tmp_path).close()
    else:
        with pytest.raises(ConfigError, match="if it is gone, remove"):
            FolderLock(tmp_path)


@pytest.mark.parametrize("kind", ["link", "second name", "directory", "pipe", "link to nothing"])
def test_the_place_of_the_lock_is_taken(tmp_path: Path, kind: str) -> None:
    """Nothing is written through a link, and the message names the remedy."""
    folder, precious = tmp_path / "out", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("precious")
    make = {
        "link": lambda: (folder / LOCK).symlink_to(precious),
        "second name": lambda: (folder / LOCK).hardlink_to(precious),
        "directory": (folder / LOCK).mkdir,
        "pipe": lambda: os.mkfifo(folder / LOCK),
        "link to nothing": lambda: (folder / LOCK).symlink_to(tmp_path / "nowhere"),
    }
    make[kind]()
    with pytest.raises(ConfigError, match=f"output_dir: {folder / LOCK} is .*remove it$"):
        FolderLock(folder)
    assert precious.read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=r"output_dir: .*/a/b cannot be written: the disk is full: free space"):
        FolderLock(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_away_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before has made the folder, and takes it away between our look and our lock."""
    folder, real, left = tmp_path / "out", os.open, [1]

    def racing(path: str | Path, *arguments: object, **named: object) -> int:
        if str(path).endswith(LOCK) and left:
            left.pop()
            folder.rmdir()
        return real(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", racing)
    with FolderLock(folder):
        assert (folder / LOCK).exists()


def test_a_folder_that_was_moved_away_leaves_the_lock_of_its_successor(tmp_path: Path) -> None:
    first = FolderLock(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    with FolderLock(tmp_path / "out"):
        first.close()
        with pytest.raises(ConfigError, match="in use by process"):
            FolderLock(tmp_path / "out")


def test_a_folder_is_known_by_its_lock_or_by_itself(tmp_path: Path) -> None:
    folder, moved = tmp_path / "out", tmp_path / "moved"
    with FolderLock(folder) as lock:
        lock.check()
        folder.rename(moved)
        with pytest.raises(FileNotFoundError):
            lock.check()
        with FolderLock(folder), pytest.raises(FolderMoved, match="was moved or replaced"):
            lock.check()
        folder.mkdir(exist_ok=True)  # the other run has ended, and its lock is gone
        with pytest.raises(FolderMoved, match="put it back and the next save goes into it$"):
            lock.check()
        folder.rmdir()
        moved.rename(folder)
        (folder / LOCK).unlink()  # by a hand
        lock.check()
        with FolderLock(folder), pytest.raises(FolderMoved):
            lock.check()
