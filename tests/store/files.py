"""Scratch files that break on purpose: at the n-th transfer, or in what they give back."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from layerferry.store.scratch import ScratchFile


class BreakingFile(ScratchFile):
    """``fault`` (an errno) at transfer number ``at`` (from 0) of the ``kinds``, and at every one behind it."""

    def __init__(self, folder: Path, at: int, fault: int, *, kinds: tuple[str, ...] = ("read", "write")) -> None:
        super().__init__(folder)
        self._left, self._fault, self._kinds = at, fault, kinds
        self._lock = threading.Lock()

    def _hit(self, kind: str) -> None:
        if kind in self._kinds:
            with self._lock:
                self._left -= 1
                if self._left < 0:
                    raise OSError(self._fault, os.strerror(self._fault))

    def read_at(self, target: memoryview, position: int) -> None:
        self._hit("read")
        super().read_at(target, position)

    def write_at(self, source: memoryview, position: int) -> None:
        self._hit("write")
        super().write_at(source, position)


class MemoryFile(ScratchFile):
    """A disk that is memory: quick, whatever else the machine's disk has to do."""

    def open(self, num_bytes: int) -> None:
        self._bytes = memoryview(bytearray(num_bytes))

    def read_at(self, target: memoryview, position: int) -> None:
        target[:] = self._bytes[position : position + len(target)]

    def write_at(self, source: memoryview, position: int) -> None:
        self._bytes[position : position + len(source)] = source


class SmallDisk(ScratchFile):
    """A disk with room for ``room`` bytes."""

    def __init__(self, folder: Path, room: int) -> None:
        super().__init__(folder)
        self._room = room

    def free_bytes(self) -> int:
        return self._room

    def open(self, num_bytes: int) -> None:
        if num_bytes > self._room:
            raise OSError(28, os.strerror(28))
        super().open(num_bytes)


class GatedFile(ScratchFile):
    """Transfers of the ``kinds`` wait until they are let through. A context manager: a test that fails inside lets them through,
    or the threads that wait would outlive it."""

    def __init__(self, folder: Path, *, kinds: tuple[str, ...]) -> None:
        super().__init__(folder)
        self._kinds = kinds
        self.gate = threading.Event()

    def __enter__(self) -> GatedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()

    def read_at(self, target: memoryview, position: int) -> None:
        if "read" in self._kinds:
            self.gate.wait()
        super().read_at(target, position)

    def write_at(self, source: memoryview, position: int) -> None:
        if "write" in self._kinds:
            self.gate.wait()
        super().write_at(source, position)


def flip(file: ScratchFile, position: int) -> None:
    """One bit of the byte at ``position`` is another."""
    own = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
    try:
        (byte,) = os.pread(own, 1, position)
        os.pwrite(own, bytes([byte ^ 1]), position)
        os.fsync(own)
    finally:
        os.close(own)
