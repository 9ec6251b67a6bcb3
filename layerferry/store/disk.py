"""The disk tier: optimizer planes of some units live in a file, and come to host memory for as long as somebody needs them.

*Fetch* brings a unit's planes from the disk into one of ``RING`` host buffers, *spill* takes them back. Both are cut in pieces
of 8 MiB over a few threads, past the page cache, and run beside whatever else happens: while one unit is stepped, the next
ones in the order of updates are read ahead (``expect``; the order of a step is taken to be that of the next, so the first
units of a step are there before its gradients are) and the one before is written behind. A buffer that was read ahead is given
up for a reader that comes out of order, such as a checkpoint: hints can be wrong and cost time only.

Every piece is summed (CRC-32) when it is written and when it is read back: a disk that gives back other bytes ends the run. So
does a transfer that fails; the first failure is kept and raised by whoever needs the tier next, and nobody waits any more. A disk
that does not answer is named, in a run, a loop of one's own, or while weights are loaded.
Planes that were never written are zero and cost no transfer. What is in the file does not outlive the run (``scratch.py``): a
checkpoint holds everything. Checked by ``tests/store/test_disk.py`` and ``tests/engine/test_disk.py``.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from layerferry.backends.base import Backend, Fence, Lane
from layerferry.backends.pages import host_pages
from layerferry.errors import ConfigError, DiskTierError, PlanError
from layerferry.layout import round_up
from layerferry.plan import size_text
from layerferry.store.scratch import ALIGN_BYTES, ScratchFile

RING = 3
"""Host buffers: one is read ahead, one stepped, one written behind."""
PIECE_BYTES = 1 << 23
THREADS = 4
STANDSTILL_S = 60.0
"""Without a byte, after which whoever waits names the disk, and goes on waiting: to end a run is the watchdog's affair."""

log = logging.getLogger(__name__)


def file_bytes(num_bytes: int) -> int:
    """What ``num_bytes`` of a unit take on the disk and in a buffer: whole blocks."""
    return round_up(num_bytes, ALIGN_BYTES)


def ring_bytes(unit_bytes: Iterable[int]) -> int:
    """Host memory of the ring for units of so many bytes on the disk."""
    return RING * max(unit_bytes, default=0)


@dataclass(eq=False)
class _Buffer:
    memory: Tensor  # [largest unit] uint8 @host, from the start of a page
    used: list[Fence] = field(default_factory=list)
    """Passed once whoever has used it last is done."""


@dataclass(eq=False)
class _Transfer:
    """A fetch or a spill: the pieces that are still to be moved, and fences behind those that were."""

    unit: int
    buffer: _Buffer
    pending: int
    after: list[Fence]
    sums: list[int]
    fences: list[Fence] = field(default_factory=list)
    was_ahead: bool = False
    """It was begun before anybody asked for it."""


class DiskTier:
    """Owns the file, the ring and the threads. May be used from any thread, by one at a time for each unit."""

    def __init__(self, names: Mapping[int, str], num_bytes: Mapping[int, int], backend: Backend, file: ScratchFile) -> None:
        """``num_bytes``: of each unit by its index; ``names``: what they are called in messages."""
        self._names, self._backend, self._file = dict(names), backend, file
        self._sizes = {unit: file_bytes(size) for unit, size in num_bytes.items()}
        self._positions = dict(zip(self._sizes, accumulate(self._sizes.values(), initial=0), strict=False))
        self.num_bytes = sum(self._sizes.values())
        """On the disk."""
        self._open()
        largest = max(self._sizes.values())
        self._free = [_Buffer(host_pages(largest)[0]) for _ in range(RING)]
        self._threads = ThreadPoolExecutor(
            max_workers=min(THREADS, len(os.sched_getaffinity(0)) + 1), thread_name_prefix="disk tier"
        )
        self._changed = threading.Condition()
        self._coming: deque[int] = deque()
        self._ahead: dict[int, _Transfer] = {}
        self._taken: set[int] = set()
        self._spilling: set[int] = set()
        self._num_waiting = 0
        self._sums: dict[int, list[int]] = {}
        self._error: DiskTierError | None = None
        self._moving, self._moving_since = 0, 0.0
        self._busy_s = 0.0
        self.bytes_read = self.bytes_written = 0
        """Since the start."""

    def _open(self) -> None:
        folder = self._file.folder
        try:
            free = self._file.free_bytes()
            self._file.open(self.num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise ConfigError(f"disk_folder: {folder} cannot be used: {error.strerror or error}: name another") from error
            short = f"{size_text(self.num_bytes - free)} short" if free < self.num_bytes else "a quota allows less"
            raise PlanError(
                f"disk_folder: {folder}: the optimizer state of {len(self._sizes)} units needs {size_text(self.num_bytes)} "
                f"@disk, {size_text(free)} are free: {short}. Free space, name a disk_folder on another disk, or set a lower "
                "disk_memory and a larger host_memory"
            ) from error

    @property
    def folder(self) -> str:
        return str(self._file.folder)

    @property
    def ring_bytes(self) -> int:
        """Host memory of the buffers."""
        return ring_bytes(self._sizes.values())

    @property
    def is_busy(self) -> bool:
        """Whether the disk has to move."""
        return self._moving > 0

    @property
    def busy_s(self) -> float:
        """Seconds since the start in which the disk had something to do."""
        with self._changed:
            return self._busy_s + (time.perf_counter() - self._moving_since if self._moving else 0.0)

    def expect(self, units: Iterable[int]) -> None:
        """They will be needed in this order, and in the same order once more; those that do not live here are passed over."""
        with self._changed:
            self._coming = deque(unit for unit in units if unit in self._sizes)
            self._read_ahead()

    @contextmanager
    def at_hand(self, unit: int, *, writes: bool) -> Iterator[Tensor]:
        """The planes of ``unit``, uint8 [its bytes in whole blocks] @host, while the caller is inside. With ``writes`` they are
        spilled behind it. TRAP: all threads together hold ``RING`` units at most, or they wait for each other: the worker two, of
        updates in stages, and a checkpoint one (tests/engine/test_disk.py)."""
        held = self._take(unit, consumes=writes)
        size = self._sizes[unit]
        try:
            for fence in held.fences:
                self._backend.wait(Lane.HOST, fence)
            yield held.buffer.memory[:size]
            has_changed = writes and (unit in self._sums or bool(held.buffer.memory[:size].view(torch.int64).any()))
        except BaseException:
            self._give_back(held, keeps=False)
            raise
        held.fences = [self._backend.record(Lane.HOST)]
        if has_changed:
            self._spill(held)
        else:
            self._give_back(held, keeps=held.was_ahead and not writes)

    def settle(self) -> None:
        """Wait until the disk has nothing to do."""
        with self._changed:
            self._wait_for(lambda: not self._moving)

    def close(self) -> None:
        """Give up what is on its way; the bytes are gone."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    # ---------------------------------------------------------------- the ring

    def _take(self, unit: int, *, consumes: bool) -> _Transfer:
        with self._changed:
            self._num_waiting += 1
            try:
                self._wait_for(lambda: unit not in self._taken | self._spilling and (unit in self._ahead or self._has_buffer()))
            finally:
                self._num_waiting -= 1
            held = self._ahead.pop(unit, None) or self._fetch(unit, self._claim_buffer())
            self._taken.add(unit)
            if consumes and unit in self._coming:
                self._coming.remove(unit)
                self._coming.append(unit)  # the next step has the same order
            self._read_ahead()
            self._wait_for(lambda: not held.pending)
        return held

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        moved = -1
        while not self._changed.wait_for(lambda: self._error is not None or condition(), STANDSTILL_S):
            before, moved = moved, self.bytes_read + self.bytes_written
            if moved == before and self._moving:
                log.warning("the disk at %s has not moved a byte for %.0f s, and is waited for", self.folder, STANDSTILL_S)
        if self._error is not None:
            raise DiskTierError(str(self._error)) from self._error

    def _has_buffer(self) -> bool:
        return bool(self._free) or any(not one.pending for one in self._ahead.values())

    def _claim_buffer(self) -> _Buffer:
        """A free one, or that of the unit which was read ahead and is needed last."""
        if self._free:
            return self._free.pop()
        order = {unit: number for number, unit in enumerate(self._coming)}
        there = [unit for unit, one in self._ahead.items() if not one.pending]
        given_up = self._ahead.pop(max(there, key=lambda unit: order.get(unit, len(order))))
        given_up.buffer.used = given_up.fences
        return given_up.buffer

    def _read_ahead(self) -> None:
        """Fill what is free with what is needed next, unless somebody waits for a buffer. Under the lock."""
        for unit in self._coming:
            if not self._free or self._num_waiting or self._error is not None:
                return
            if unit not in self._ahead:
                if unit in self._taken or unit in self._spilling:
                    return
                self._ahead[unit] = self._fetch(unit, self._free.pop())
                self._ahead[unit].was_ahead = True

    def _give_back(self, held: _Transfer, *, keeps: bool) -> None:
        """``keeps``: the buffer still holds what is on the disk."""
        with self._changed:
            self._taken.discard(held.unit)
            if keeps:
                self._ahead[held.unit] = held
            else:
                held.buffer.used = held.fences
                self._free.append(held.buffer)
            self._read_ahead()
            self._changed.notify_all()

    # ---------------------------------------------------------------- transfers

    def _fetch(self, unit: int, buffer: _Buffer) -> _Transfer:
        """Begin to read; under the lock."""
        known = self._sums.get(unit)
        pieces = self._pieces(unit)
        transfer = _Transfer(unit, buffer, len(pieces), buffer.used, known or [])
        buffer.used = []
        move = self._zero_piece if known is None else self._read_piece
        self._begin(transfer, move, pieces, on_disk=known is not None)
        return transfer

    def _spill(self, held: _Transfer) -> None:
        with self._changed:
            self._taken.discard(held.unit)
            pieces = self._pieces(held.unit)
            self._spilling.add(held.unit)
            transfer = _Transfer(held.unit, held.buffer, len(pieces), held.fences, [0] * len(pieces))
            self._begin(transfer, self._write_piece, pieces, on_disk=True, then=self._spilled)

    def _spilled(self, transfer: _Transfer) -> None:
        """The last piece is written; under the lock."""
        self._sums[transfer.unit] = transfer.sums
        self._spilling.discard(transfer.unit)
        transfer.buffer.used = transfer.fences
        self._free.append(transfer.buffer)
        self._read_ahead()

    def _pieces(self, unit: int) -> list[slice]:
        size = self._sizes[unit]
        return [slice(begin, min(begin + PIECE_BYTES, size)) for begin in range(0, size, PIECE_BYTES)]

    def _begin(
        self,
        transfer: _Transfer,
        move: Callable[[_Transfer, int, Tensor, int], None],
        pieces: list[slice],
        *,
        on_disk: bool,
        then: Callable[[_Transfer], None] = lambda _: None,
    ) -> None:
        """Queue every piece; under the lock."""
        if on_disk:
            if not self._moving:
                self._moving_since = time.perf_counter()
            self._moving += len(pieces)
        for number, piece in enumerate(pieces):
            self._threads.submit(self._run, transfer, move, number, piece, on_disk, then)

    def _run(
        self,
        transfer: _Transfer,
        move: Callable[[_Transfer, int, Tensor, int], None],
        number: int,
        piece: slice,
        on_disk: bool,
        then: Callable[[_Transfer], None],
    ) -> None:
        """One piece, in any thread; after a failure anywhere nothing more is moved, but everything is counted."""
        error: BaseException | None = None
        fence: Fence | None = None
        try:
            if self._error is None:
                for before in transfer.after:
                    self._backend.wait(Lane.HOST, before)
                move(transfer, number, transfer.buffer.memory[piece], self._positions[transfer.unit] + piece.start)
                fence = self._backend.record(Lane.HOST)
        except BaseException as raised:  # kept, and raised where the unit is waited for
            error = raised
        with self._changed:
            if error is not None:
                self._fail(error, transfer.unit)
            if fence is not None:
                transfer.fences.append(fence)
            transfer.pending -= 1
            if on_disk:
                self._moving -= 1
                if not self._moving:
                    self._busy_s += time.perf_counter() - self._moving_since
                    self._changed.notify_all()
            if not transfer.pending:
                if self._error is None:
                    then(transfer)
                self._changed.notify_all()

    def _zero_piece(self, transfer: _Transfer, number: int, memory: Tensor, position: int) -> None:
        self._backend.touch(Lane.HOST, writes=[memory])
        memory.zero_()

    def _read_piece(self, transfer: _Transfer, number: int, memory: Tensor, position: int) -> None:
        self._backend.touch(Lane.HOST, writes=[memory])
        view = _view(memory)
        self._file.read_at(view, position)
        if zlib.crc32(view) != transfer.sums[number]:
            raise DiskTierError(
                f"the disk at {self.folder} gave back other bytes than were written: optimizer state of "
                f"{self._names[transfer.unit]}, within {size_text(len(view))} from byte {number * PIECE_BYTES}"
            )
        with self._changed:
            self.bytes_read += len(view)

    def _write_piece(self, transfer: _Transfer, number: int, memory: Tensor, position: int) -> None:
        self._backend.touch(Lane.HOST, reads=[memory])
        view = _view(memory)
        transfer.sums[number] = zlib.crc32(view)
        self._file.write_at(view, position)
        with self._changed:
            self.bytes_written += len(view)

    def _fail(self, error: BaseException, unit: int) -> None:
        """Keep the first failure; under the lock."""
        if isinstance(error, OSError):
            text = f"the disk at {self.folder}: {error.strerror or error} (optimizer state of {self._names[unit]})"
            error, cause = DiskTierError(text), error
            error.__cause__ = cause
        elif not isinstance(error, DiskTierError):
            error, cause = DiskTierError(f"disk tier: {error!r}"), error
            error.__cause__ = cause
        self._error = self._error or error
        self._changed.notify_all()


def _view(memory: Tensor) -> memoryview:
    return memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that an array is a buffer
