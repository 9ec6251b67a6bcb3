"""Registering host memory with a driver, in pieces: some drivers stall on or refuse a registration of very many bytes.

A copy may not reach over the border between two registrations (CUDA calls it an invalid argument), so ``pieces`` says where a
copy must be cut. A plane is registered whole or not at all, for the same reason. Knows no device: the driver's two calls are
given.

Planes are given up whenever the last of their holders is collected, so ``unpin`` may be called by any thread and in the midst of
any other call here, of the same thread too: readers take no lock, and a writer looks whether somebody was faster. Checked by
``tests/backends/test_pinning.py``.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable

PIECE_BYTES = 4 << 30
"""A multiple of every page size."""


class Pinning:
    """Which memory is registered. ``register(address, num_bytes)`` gives an error code, 0 for success."""

    def __init__(
        self, register: Callable[[int, int], int], unregister: Callable[[int], object], *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._register, self._unregister, self._piece_bytes = register, unregister, piece_bytes
        self._borders: tuple[int, ...] = ()
        self._lock = threading.RLock()

    def pin(self, address: int, num_bytes: int) -> int:
        """Register all of it; the driver's error code where it refuses a piece, and then none of it is."""
        starts = list(range(address, address + num_bytes, self._piece_bytes))
        for number, start in enumerate(starts):
            code = self._register(start, min(self._piece_bytes, address + num_bytes - start))
            if code:
                for done in starts[:number]:
                    self._unregister(done)
                return code
        self._change(lambda known: tuple(sorted((*known, *starts[1:]))))
        return 0

    def unpin(self, address: int, num_bytes: int) -> None:
        """Undo ``pin``."""
        starts = list(range(address, address + num_bytes, self._piece_bytes))
        for start in starts:
            self._unregister(start)
        gone = frozenset(starts[1:])
        self._change(lambda known: tuple(border for border in known if border not in gone))

    def _change(self, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        with self._lock:
            while True:
                known = self._borders
                changed = change(known)
                if self._borders is known:  # else a plane was collected in the meantime, by this thread
                    self._borders = changed
                    return

    def pieces(self, address: int, num_bytes: int) -> list[slice]:
        """The stretches of ``num_bytes`` bytes from ``address`` on that one copy each may have."""
        borders = self._borders
        first, last = bisect_right(borders, address), bisect_right(borders, address + num_bytes - 1)
        cuts = [border - address for border in borders[first:last]]
        return [slice(begin, end) for begin, end in zip([0, *cuts], [*cuts, num_bytes], strict=True)]
