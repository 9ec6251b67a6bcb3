"""A disk that breaks at the n-th operation: an error, a kill, or a power cut that loses what was not flushed.

After a kill or a cut every operation fails, as none would happen: code that tidies up in ``finally`` gets no chance.
A power cut also takes back what POSIX does not promise: bytes written since the last ``sync`` of their file, and renames
since the last ``sync_folder`` of their folder.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from layerferry.checkpoint.files import PRIMITIVES, Files


class QuickFiles(Files):
    """The real disk without the wait for it: thousands of saves a minute."""

    def create_large(self, path: Path) -> int:
        """Through the page cache."""
        return super().create(path)

    def write_at(self, descriptor: int, piece: memoryview, position: int) -> int:
        """Not flushed."""
        return os.pwrite(descriptor, piece, position)

    def sync(self, descriptor: int) -> None:
        """Nothing."""

    def sync_folder(self, path: Path) -> None:
        """Nothing."""


class Killed(BaseException):
    """The process is gone."""


class BreakingFiles(QuickFiles):
    """``fault`` at operation number ``at`` (from 0): an errno, "kill", "torn" (a kill in the middle of a write), or "cut"."""

    def __init__(self, at: int, fault: int | str, *, lasting: bool = False) -> None:
        self.at, self.fault, self.lasting = at, fault, lasting
        self.count = 0
        self.dead = False
        self.names: list[str] = []
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        self._unsynced: dict[Path, int] = {}  # file -> bytes that are safe
        self._renames: list[tuple[Path, Path, bytes | None]] = []  # and the file that was replaced

    def _hit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if self.dead:
            raise Killed
        with self._lock:
            number = self.count
            self.count += 1
            self.names.append(name)
        if number < self.at or (number > self.at and not self.lasting):
            return
        if isinstance(self.fault, int):
            if name in ("close", "free_bytes"):
                return  # these do not fail in ways that matter
            raise OSError(self.fault, os.strerror(self.fault))
        self.dead = True
        if self.fault == "torn" and name == "write":
            descriptor, piece = arguments
            os.write(descriptor, piece[: len(piece) // 2])
        if self.fault == "torn" and name == "write_at":
            descriptor, piece, position = arguments
            os.pwrite(descriptor, piece[: len(piece) // 2], position)
        if self.fault == "cut":
            self._lose()
        raise Killed

    def _lose(self) -> None:
        for source, target, replaced in reversed(self._renames):
            if target.exists():
                os.rename(target, source)
                if replaced is not None:
                    target.write_bytes(replaced)
                moved = {path: safe for path, safe in self._unsynced.items() if path.is_relative_to(target)}
                for path, safe in moved.items():
                    self._unsynced[source / path.relative_to(target)] = safe
        for path, safe in self._unsynced.items():
            if path.exists():
                os.truncate(path, safe)


def _breaking(name: str) -> Any:
    real = getattr(QuickFiles, name)

    def operation(self: BreakingFiles, *arguments: Any) -> Any:
        self._hit(name, arguments)
        replaced = arguments[1].read_bytes() if name == "rename" and arguments[1].is_file() else None
        result = real(self, *arguments)
        if name in ("create", "create_large"):
            self._paths[result] = arguments[0]
            self._unsynced[arguments[0]] = 0
        elif name == "sync":
            self._unsynced.pop(self._paths[arguments[0]], None)
        elif name == "rename":
            source, target = arguments
            self._renames.append((source, target, replaced))
            for path in [path for path in self._unsynced if path.is_relative_to(source)]:
                self._unsynced[target / path.relative_to(source)] = self._unsynced.pop(path)
        elif name == "sync_folder":
            self._renames = [one for one in self._renames if one[1].parent != arguments[0]]
        return result

    return operation


for _name in PRIMITIVES:
    setattr(BreakingFiles, _name, _breaking(_name))
