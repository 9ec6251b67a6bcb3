"""Registration in pieces with a driver that only writes down what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest

from layerferry.backends.pinning import PIECE_BYTES, Pinning


class Driver:
    """Refuses a range that overlaps a registered one, as CUDA does, and the call number ``refuses``."""

    def __init__(self, refuses: int = -1) -> None:
        self.ranges: dict[int, int] = {}
        self._left = refuses

    def register(self, address: int, num_bytes: int) -> int:
        self._left -= 1
        assert all(address >= start + size or address + num_bytes <= start for start, size in self.ranges.items())
        if self._left == -1:
            return 2
        self.ranges[address] = num_bytes
        return 0

    def unregister(self, address: int) -> None:
        del self.ranges[address]

    def copies(self, address: int, num_bytes: int) -> bool:
        """Whether one copy may touch these bytes: inside one registration, or outside of all."""
        touched = [s for s, size in self.ranges.items() if s < address + num_bytes and address < s + size]
        return not touched or (
            len(touched) == 1 and touched[0] <= address and address + num_bytes <= touched[0] + self.ranges[touched[0]]
        )


def test_pieces_cover_and_copies_stay_inside_them() -> None:
    driver = Driver()
    pinning = Pinning(driver.register, driver.unregister, piece_bytes=4096)
    assert pinning.pin(1 << 20, 10000) == 0 and pinning.pin(1 << 21, 4096) == 0
    assert driver.ranges == {1 << 20: 4096, (1 << 20) + 4096: 4096, (1 << 20) + 8192: 1808, 1 << 21: 4096}
    for begin, end in ((0, 10000), (0, 4096), (4095, 4097), (5000, 9000), (9999, 10000), (4096, 8192)):
        found = pinning.pieces((1 << 20) + begin, end - begin)
        assert found[0].start == 0 and found[-1].stop == end - begin
        assert all(one.stop == other.start for one, other in pairwise(found))
        assert all(driver.copies((1 << 20) + begin + one.start, one.stop - one.start) for one in found)
    assert pinning.pieces(1 << 21, 4096) == [slice(0, 4096)]
    pinning.unpin(1 << 20, 10000)
    assert driver.ranges == {1 << 21: 4096} and len(pinning.pieces(1 << 20, 10000)) == 1


@pytest.mark.parametrize("refuses", [0, 1, 2])
def test_a_plane_is_registered_whole_or_not_at_all(refuses: int) -> None:
    driver = Driver(refuses)
    pinning = Pinning(driver.register, driver.unregister, piece_bytes=4096)
    assert pinning.pin(1 << 20, 10000) == 2
    assert not driver.ranges and len(pinning.pieces(1 << 20, 10000)) == 1


def test_pieces_end_at_pages_of_every_size() -> None:
    assert PIECE_BYTES % (1 << 30) == 0


class Collecting(int):
    """An address that lets ``then`` happen when it is first compared, as a garbage collection would."""

    then: Callable[[], object] | None = None

    def __lt__(self, other: int) -> bool:
        happens, self.then = self.then, None
        if happens is not None:
            happens()
        return int(self) < other


def test_a_plane_may_be_collected_while_another_is_copied() -> None:
    driver = Driver()
    pinning = Pinning(driver.register, driver.unregister, piece_bytes=4096)
    assert pinning.pin(1 << 20, 10000) == 0 and pinning.pin(1 << 21, 10000) == 0
    address, found = Collecting(1 << 21), list[slice]()
    address.then = lambda: pinning.unpin(1 << 20, 10000)
    worker = threading.Thread(target=lambda: found.extend(pinning.pieces(address, 10000)), daemon=True)
    worker.start()
    worker.join(timeout=10)
    assert not worker.is_alive(), "it waits for itself"
    assert found == [slice(0, 4096), slice(4096, 8192), slice(8192, 10000)]
    assert list(driver.ranges) == [(1 << 21) + 4096 * number for number in range(3)]


def test_a_plane_may_be_collected_while_another_is_pinned() -> None:
    driver = Driver()
    pinning = Pinning(driver.register, driver.unregister, piece_bytes=4096)
    assert pinning.pin(1 << 20, 10000) == 0

    def change(known: tuple[int, ...]) -> tuple[int, ...]:
        if (1 << 20) + 4096 in known:
            pinning.unpin(1 << 20, 10000)
        return (*known, 1 << 22)

    pinning._change(change)
    assert pinning._borders == (1 << 22,)
