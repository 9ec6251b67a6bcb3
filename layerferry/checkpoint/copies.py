"""Copies of units that wait for the disk: host memory that can be spared lets a unit go long before it is written.

A unit that lives @device must be copied to be written; one @host is written from where it lies, or copied too where there is
room, since a copy takes a tenth of the disk's time and the unit's next update then need not wait. Copies together never take
more than ``budget_bytes``, or one piece where that is larger; without a budget units @host are not copied at all.
Checked by ``tests/checkpoint/test_copies.py``.
"""

from __future__ import annotations

import threading

from torch import Tensor

from layerferry.backends.base import Backend


class Room:
    """Buffers @host, taken by one thread and given back by any."""

    def __init__(self, backend: Backend, budget_bytes: int, *, largest_bytes: int, travels: bool) -> None:
        """``largest_bytes``: the most that will be taken at once. ``travels``: some of them are filled from the device."""
        self._backend, self._budget_bytes, self._travels = backend, budget_bytes, travels
        self._largest_bytes = largest_bytes if budget_bytes < largest_bytes else 0  # one at a time: one for all
        self._changed = threading.Condition()
        self._free: list[Tensor] = []
        self._num_out = 0
        self._held_bytes = 0
        """Of all buffers, taken or free."""

    def has(self, num_bytes: int) -> bool:
        """Whether so many bytes will ever be spared."""
        return num_bytes <= self._budget_bytes

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [at least num_bytes] @host, pinned where it ``travels``; waits for room, and is alone where it exceeds the
        budget."""
        num_bytes = max(num_bytes, self._largest_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._fits(num_bytes))
            fitting = [buffer for buffer in self._free if buffer.numel() == num_bytes]
            if fitting:
                self._free = [buffer for buffer in self._free if buffer is not fitting[-1]]
            else:
                self._make_room(num_bytes)
                self._held_bytes += num_bytes
            self._num_out += 1
        return fitting[-1] if fitting else self._backend.host_buffer(num_bytes, travels=self._travels)

    def give(self, buffer: Tensor) -> None:
        """Give back what ``take`` returned; nothing reads it any more."""
        with self._changed:
            self._free.append(buffer)
            self._num_out -= 1
            self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        free_bytes = sum(buffer.numel() for buffer in self._free)
        return not self._num_out or self._held_bytes - free_bytes + num_bytes <= self._budget_bytes

    def _make_room(self, num_bytes: int) -> None:
        while self._free and self._held_bytes + num_bytes > self._budget_bytes:
            self._held_bytes -= self._free.pop().numel()
