"""The only door between the files of a run and the disk: thirteen primitives, each of which a test can make fail or be the last.

A run that has locked its folder goes through ``lock.LockedFiles``. Nothing here retries or repairs. Files are made with the
user's umask (no ``mkstemp``, whose files are private). Large files pass by the page cache (``O_DIRECT``): the host memory belongs
to the planes, and the kernel copies nothing. Where a file system cannot do that, every write is flushed and dropped from the
cache at once, so unwritten pages never pile up. Checked by ``tests/checkpoint/test_files.py``; broken on purpose by
``tests/checkpoint/faults.py``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

PIECE_BYTES = 1 << 30
"""Linux transfers at most 2 GiB - 4 KiB in one call."""

ALIGN_BYTES = 4096
"""Address, position and length of a write past the page cache are multiples of the disk's block; no disk's is larger."""

PRIMITIVES = (
    *("make_folder", "create", "create_large", "open_to_append", "write", "write_at", "truncate", "sync", "close"),
    *("rename", "sync_folder", "remove", "free_bytes"),
)
"""Names of the operations that change or ask the disk: where faults are injected."""


class Files:
    """The real disk. Safe to use from any thread; a descriptor belongs to whoever created it."""

    def check(self) -> None:
        """``OSError`` where the folder that they are written into is no longer the writer's (``lock.LockedFiles``)."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def create_large(self, path: Path) -> int:
        """As ``create``, for ``write_at``."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        path.unlink(missing_ok=True)  # some systems have made it before they refuse
        return os.open(path, flags, 0o666)

    def open_to_append(self, path: Path) -> int:
        """What is written comes behind what is there, if anything: never through a link, and no pipe is waited for."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(path, flags, 0o666)

    def write(self, descriptor: int, piece: memoryview) -> int:
        """Bytes that were taken, at least one."""
        return os.write(descriptor, piece[:PIECE_BYTES])

    def write_at(self, descriptor: int, piece: memoryview, position: int) -> int:
        """Bytes that were taken, at least one; past the page cache where all three are multiples of ``ALIGN_BYTES``."""
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            try:
                return os.pwrite(descriptor, piece, position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        taken = os.pwrite(descriptor, piece, position)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, position, taken, os.POSIX_FADV_DONTNEED)
        return taken

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """The file ends here: what filled up the last block goes."""
        os.ftruncate(descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        """Everything written is on the disk, and no longer in memory."""
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """``target`` may be a file, which is replaced, or must not be there."""
        os.rename(source, target)

    def sync_folder(self, path: Path) -> None:
        """The names in ``path`` are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """A file or a whole folder; nothing happens where there is none."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write beside ``path``."""
        return shutil.disk_usage(path).free


def write_all(files: Files, descriptor: int, piece: memoryview) -> None:
    """Write the whole of ``piece``, however little the system takes at a time."""
    while piece:
        piece = piece[files.write(descriptor, piece) :]


def write_file(files: Files, path: Path, content: bytes) -> None:
    """A new file with ``content``, on the disk."""
    descriptor = files.create(path)
    try:
        write_all(files, descriptor, memoryview(content))
        files.sync(descriptor)
    finally:
        files.close(descriptor)


def replace_file(files: Files, path: Path, content: bytes) -> None:
    """``path`` is the old file or the new one, whole, whatever happens; where it was a link, the link goes and not its target."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    files.remove(partial)
    try:
        write_file(files, partial, content)
        files.rename(partial, path)
    except OSError:
        with suppress(OSError):
            files.remove(partial)
        raise
    files.sync_folder(path.parent)


def read_small(path: Path, most_bytes: int) -> bytes:
    """The content of a plain file; ``OSError`` for anything else (a pipe would be waited for), and for more than
    ``most_bytes``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, at most {most_bytes} make sense", str(path))
        return stream.read()


def reason_of(error: OSError) -> str:
    """What went wrong and what helps, in a few words."""
    remedies = {
        errno.ENOSPC: "the disk is full: free space, or lower save_total_limit",
        errno.EDQUOT: "the quota is used up: free space, or lower save_total_limit",
        errno.EROFS: "the file system is read-only: remount it, or use another output_dir",
        errno.EACCES: "not permitted: check the owner and mode of output_dir",
        errno.ENOENT: "the folder has vanished: is the disk still mounted?",
        errno.EFBIG: "the file is larger than is allowed: raise `ulimit -f`, or use another file system",
        errno.EIO: "the disk reports an input/output error: look at the kernel's log",
        errno.ESTALE: "the network file system has lost the folder: mount it again",
    }
    return remedies.get(error.errno or 0, error.strerror or str(error))
