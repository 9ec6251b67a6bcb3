"""The only door between the disk tier and the disk: a file without a name, and four primitives that a test can make fail.

The file has no name from the moment it is made (``tempfile.TemporaryFile``), so two runs cannot share it, a killed one leaves
nothing behind, and nobody takes it for a checkpoint: what is in it ends with the process. Its blocks are allocated at once, so a
disk that is too small says so before the first step. Reads and writes pass by the page cache (``O_DIRECT``): the host memory
belongs to the planes. Where a file system cannot do that, what was written is flushed and dropped from the cache.
Nothing here retries. Checked by ``tests/store/test_scratch.py``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from layerferry.errors import ConfigError

ALIGN_BYTES = 4096
"""Address, position and length of a transfer past the page cache are multiples of the disk's block; no disk's is larger."""


def existing(folder: Path) -> Path:
    """``folder``, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def check_folder(folder: Path) -> None:
    """``ConfigError`` where ``folder`` could not have a file: found before anything is loaded. Leaves nothing behind."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ConfigError(f"disk_folder: {folder}: {there} is no folder: name one on the disk that optimizer state is to take")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"disk_folder: {folder}: {there} may not be written: check its owner and mode, or name another folder")


def is_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether what is written into ``folder`` stays in host memory: ``/tmp`` is such a file system in some distributions."""
    device = existing(folder).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    return any(words[2] == number and words[words.index("-") + 1] in ("tmpfs", "ramfs") for words in lines if "-" in words)


class ScratchFile:
    """Safe to use from any thread once it is open; transfers of all threads may overlap in time, but not in place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[bytes] | None = None

    @property
    def descriptor(self) -> int:
        assert self._file is not None, "not open"
        return self._file.fileno()

    def open(self, num_bytes: int) -> None:
        """Make the file, all its blocks allocated; ``OSError`` where the disk has no room. A folder that is missing is made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115  closed by ``close``, or with the run
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)
        except OSError:
            self.close()
            raise
        self._pass_by_the_cache(True)

    def free_bytes(self) -> int:
        """Bytes that this user may still write here."""
        return shutil.disk_usage(existing(self.folder)).free

    def read_at(self, target: memoryview, position: int) -> None:
        """Fill ``target`` from ``position``."""
        while target:
            taken = self._transfer(lambda piece, at: os.preadv(self.descriptor, [piece], at), target, position)
            if not taken:
                raise OSError(errno.EIO, f"the file ends at byte {position}")
            if not self._passes_by:
                os.posix_fadvise(self.descriptor, position, taken, os.POSIX_FADV_DONTNEED)
            target, position = target[taken:], position + taken

    def write_at(self, source: memoryview, position: int) -> None:
        """Write the whole of ``source`` at ``position``."""
        while source:
            taken = self._transfer(lambda piece, at: os.pwrite(self.descriptor, piece, at), source, position)
            if not self._passes_by:
                os.fdatasync(self.descriptor)
                os.posix_fadvise(self.descriptor, position, taken, os.POSIX_FADV_DONTNEED)
            source, position = source[taken:], position + taken

    def close(self) -> None:
        """The bytes are gone; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---------------------------------------------------------------- O_DIRECT

    @property
    def _passes_by(self) -> bool:
        return bool(fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def _pass_by_the_cache(self, wanted: bool) -> None:
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def _transfer(self, call: Callable[[memoryview, int], int], piece: memoryview, position: int) -> int:
        """Bytes that went over. Some file systems take the flag and then refuse the transfer: once more without it."""
        try:
            return call(piece, position)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._passes_by:
                raise
        self._pass_by_the_cache(False)
        return call(piece, position)
