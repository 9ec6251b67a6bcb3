"""Registering host memory with a driver, in pieces: some drivers stall on or refuse a registration of very many bytes.

A copy may not reach over the border between two registrations (CUDA calls it an invalid argument), so ``pieces`` says where a
copy must be cut. A plane is registered whole or not at all, for the same reason. Knows no device: the driver's two calls are
given. Checked by ``tests/backends/test_pinning.py``.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable

PIECE_BYTES = 4 << 30
"""A multiple of every page size."""


class Pinning:
    """Which memory is registered. ``register(address, num_bytes)`` gives an error code, 0 for success."""

    def __init__(
        self, register: Callable[[int, int], int], unregister: Callable[[int], object], *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._register, self._unregister, self._piece_bytes = register, unregister, piece_bytes
        self._borders: list[int] = []
        self._lock = threading.Lock()

    def pin(self, address: int, num_bytes: int) -> int:
        """Register all of it; the driver's error code where it refuses a piece, and then none of it is."""
        starts = list(range(address, address + num_bytes, self._piece_bytes))
        for number, start in enumerate(starts):
            code = self._register(start, min(self._piece_bytes, address + num_bytes - start))
            if code:
                for done in starts[:number]:
                    self._unregister(done)
                return code
        with self._lock:
            for start in starts[1:]:
                insort(self._borders, start)
        return 0

    def unpin(self, address: int, num_bytes: int) -> None:
        """Undo ``pin``."""
        starts = list(range(address, address + num_bytes, self._piece_bytes))
        for start in starts:
            self._unregister(start)
        with self._lock:
            for start in starts[1:]:
                self._borders.remove(start)

    def pieces(self, address: int, num_bytes: int) -> list[slice]:
        """The stretches of ``num_bytes`` bytes from ``address`` on that one copy each may have."""
        with self._lock:
            first = bisect_right(self._borders, address)
            last = bisect_right(self._borders, address + num_bytes - 1)
            cuts = [border - address for border in self._borders[first:last]]
        return [slice(begin, end) for begin, end in zip([0, *cuts], [*cuts, num_bytes], strict=True)]
