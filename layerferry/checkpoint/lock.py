"""One run a folder: a lock that the kernel takes back when its owner dies, however it dies.

``.layerferry.lock`` is held with ``flock`` while the run lives; the pid, host and time in it are for the message, never for
the decision, so a crash leaves nothing to clean up. Where the file system has no locks (some network mounts), pid and host
decide: an owner on this host that no longer runs is gone. The file is written in place, so it must be a plain file with one
name: a link would have its target emptied. A folder that is moved takes its lock along, and writing by path would then fill
another run's: so a run writes through ``LockedFiles``, which look first. Checked by ``tests/checkpoint/test_lock.py``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from layerferry.checkpoint.files import Files, reason_of
from layerferry.errors import ConfigError

LOCK = ".layerferry.lock"
MOST_TRIES = 1000
"""Of taking a lock whose file or folder others keep removing."""
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


class FolderMoved(OSError):
    """The path no longer leads to the folder that this run has locked."""


class FolderLock:
    """Held from construction until it is closed. Makes a missing folder, and takes it away again when it stays empty.

    ``ConfigError`` where another run has it, or where the folder or the lock's file cannot be made."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOCK
        self._made: list[Path] = []
        try:
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]
            self._descriptor = self._take()
            self._place = folder.stat()
        except (OSError, ConfigError) as error:
            self._take_away()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"output_dir: {self._reason(error)}") from error
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, (json.dumps(owner) + "\n").encode(), 0)
        except OSError as error:
            self.close()
            raise ConfigError(f"output_dir: {self._reason(error)}") from error

    def _take(self) -> int:
        for _ in range(MOST_TRIES):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # the run before has just taken away the folder that it had made
            self._lock(descriptor)
            if _is_still(descriptor, self._path):
                return descriptor
            os.close(descriptor)  # the run before removed the file between our opening and our locking
        raise OSError(errno.EBUSY, "the folder comes and goes: is another program removing it?")

    def _lock(self, descriptor: int) -> None:
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise ConfigError(f"output_dir: {self._path} is no file of its own: remove it")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(descriptor)
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise ConfigError(_refusal(self._folder, owner)) from error
            if _may_live(owner):
                os.close(descriptor)
                reason = f"{_refusal(self._folder, owner)}; if it is gone, remove {self._path}"
                raise ConfigError(reason) from error
        except ConfigError:
            os.close(descriptor)
            raise

    def _reason(self, error: OSError) -> str:
        """What is in the way of the folder or of the file, and what to do."""
        if error.errno in (errno.ELOOP, errno.EISDIR) and os.path.lexists(self._path):
            kind = "link" if self._path.is_symlink() else "directory"
            return f"{self._path} is a {kind}, and the lock is written there: remove it"
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            there = next((path for path in (self._folder, *self._folder.parents) if os.path.lexists(path)), self._folder)
            kind = "a link to nothing" if there.is_symlink() else "no folder"
            return f"{self._folder} cannot be written: {there} is {kind}: name another"
        return f"{self._folder} cannot be written: {reason_of(error)}"

    def check(self) -> None:
        """``OSError`` where the path does not lead to the locked folder: gone, or (``FolderMoved``) another one. A lock's file
        that somebody removed is not missed while the folder is the same."""
        try:
            is_ours = os.path.samestat(os.fstat(self._descriptor), self._path.lstat())
        except FileNotFoundError:
            is_ours = os.path.samestat(self._place, self._folder.stat())
        if not is_ours:
            raise FolderMoved(
                f"{self._folder} is no longer the folder that this run has locked: it was moved or replaced, or its disk is not "
                "mounted; put it back and the next save goes into it"
            )

    def close(self) -> None:
        """Let the folder go; where it was moved away and another run has begun in its place, that one's lock stays."""
        with suppress(OSError):
            if _is_still(self._descriptor, self._path):
                self._path.unlink()
        os.close(self._descriptor)
        self._take_away()

    def _take_away(self) -> None:
        for path in self._made:
            with suppress(OSError):
                path.rmdir()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class LockedFiles(Files):
    """The disk of a run that has locked its folder: nothing is made, renamed or removed once the path leads elsewhere. What is
    written by descriptor needs no look: it goes into the file that was made."""

    def __init__(self, lock: FolderLock) -> None:
        self._lock = lock

    def check(self) -> None:
        self._lock.check()

    def make_folder(self, path: Path) -> None:
        self.check()
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self.check()
        return super().create(path)

    def create_large(self, path: Path) -> int:
        self.check()
        return super().create_large(path)

    def open_to_append(self, path: Path) -> int:
        self.check()
        return super().open_to_append(path)

    def rename(self, source: Path, target: Path) -> None:
        self.check()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.check()
        super().remove(path)


def _owner(descriptor: int) -> dict[str, object]:
    try:
        value = json.loads(os.pread(descriptor, 4096, 0).decode())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _refusal(folder: Path, owner: dict[str, object]) -> str:
    who = f"process {owner['pid']} on {owner.get('host')}, since {owner.get('since')}" if "pid" in owner else "another process"
    return f"output_dir: {folder} is in use by {who}: wait for it, stop it, or use another output_dir"


def _may_live(owner: dict[str, object]) -> bool:
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    if owner.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
