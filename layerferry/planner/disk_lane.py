"""The disk in the played step: when the state of a unit is at hand for its update, and when the disk is done.

One lane that works in order: behind the spill of a unit comes the fetch of the one that takes its buffer, ``RING`` places later
in the order of updates. Past the last unit the order begins anew: those fetches are the next step's, which finds the ring full.
How fast the lane is with both directions at once is in its rates (``disk_rates.py``). Checked by
``tests/planner/test_disk.py`` against closed forms.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerferry.store.disk import RING


class DiskLane:
    """Of one step. ``free``: when the disk has nothing left to do."""

    def __init__(self, units: Sequence[tuple[float, float]], *, begin: float = 0.0) -> None:
        """(fetch, spill) seconds of every unit @disk in the order of updates; the first ones are in the ring at ``begin``."""
        self._units = tuple(units)
        self._fetched = [begin] * len(self._units)
        self._num_asked = self._num_spilled = 0
        self.free = begin
        self.work = sum(fetch + spill for fetch, spill in self._units)

    def at_hand(self) -> float:
        """When the next unit in order has been fetched."""
        self._num_asked += 1
        return self._fetched[self._num_asked - 1]

    def spill(self, updated: float) -> None:
        """The first unit that has not been spilled yet is ``updated`` then."""
        number, count = self._num_spilled, len(self._units)
        coming = (number + min(RING, count)) % count
        self.free = max(self.free, updated) + self._units[number][1] + self._units[coming][0]
        self._fetched[coming] = self.free
        self._num_spilled += 1
