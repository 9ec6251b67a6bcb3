"""Which units' state goes to the disk, what that saves @host and what it costs: for a search that asks thousands of times.

Units go in one order (``held.disk_order``), so for a number of units at home the choices are one row, from none to all that
travel, and the least that is enough is found by bisection. Bytes are those of the store's disk tier. Checked by
``tests/planner/test_disk.py`` and, as a part of ``Books``, by ``test_search.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from layerferry.planner.held import disk_bytes, disk_order
from layerferry.planner.machine import Machine
from layerferry.planner.problem import Problem
from layerferry.store.disk import ring_bytes
from layerferry.store.store import state_specs


class DiskBooks:
    """What of the state of some units @disk costs and saves."""

    def __init__(self, question: Problem) -> None:
        self._units, self._specs = question.model.units, question.specs
        self._available, self._pinned = question.machine.disk_available, question.pins.disk_units
        self._order = disk_order(self._units, question.specs)
        self._sizes = {index: disk_bytes(self._units[index], question.specs) for index in self._order}
        kinds = state_specs(question.specs).values()
        self._held = {index: sum(self._units[index].layout.bytes(spec) for spec in kinds) for index in self._order}
        self._saved: dict[tuple[int, ...], int] = {}
        self._choices: dict[int, list[tuple[int, ...]]] = {}
        self._reach: dict[int, list[int]] = {}
        """By home: the most that each of the choices, or one before it, saves."""

    @property
    def is_there(self) -> bool:
        """Whether state may go there: there is room, or the user has pinned some, room or not."""
        return self._available > 0 or bool(self._pinned)

    @property
    def most_home(self) -> int:
        """Units that may be at home: the first of those that are pinned to the disk ends them."""
        return min(self._order[: self._pinned or 0], default=len(self._units))

    def bytes(self, units: tuple[int, ...]) -> int:
        """@disk."""
        return sum(self._sizes[index] for index in units)

    def saved(self, units: tuple[int, ...]) -> int:
        """Bytes @host that are not needed with ``units`` there; the ring is."""
        if units not in self._saved:
            held = sum(self._held[index] for index in units)
            self._saved[units] = held - ring_bytes(self._sizes[index] for index in units)
        return self._saved[units]

    def choices(self, home: int) -> list[tuple[int, ...]]:
        """Of units that are not among the first ``home``: none, and more and more of them, as far as that saves something."""
        if home not in self._choices:
            order = [index for index in self._order if index >= home]
            if self._pinned is not None:
                self._choices[home] = [tuple(sorted(order[: self._pinned]))]
            else:
                some = [tuple(sorted(order[:count])) for count in range(1, len(order) + 1)] if self.is_there else []
                self._choices[home] = [(), *(one for one in some if self.saved(one) > 0 and self.bytes(one) <= self._available)]
        return self._choices[home]

    def reach(self, home: int) -> list[int]:
        if home not in self._reach:
            self._reach[home] = list(accumulate(map(self.saved, self.choices(home)), max))
        return self._reach[home]

    def fewest(self, home: int, over: int) -> tuple[int, ...]:
        """The first of the ``choices`` that saves ``over`` bytes @host, or the one that saves most."""
        reach = self.reach(home)
        return self.choices(home)[bisect_left(reach, min(over, reach[-1]))]

    def least_seconds(self, units: tuple[int, ...], machine: Machine) -> tuple[float, float]:
        """(all that the disk has to do in a step, what of it lies before the last update)."""
        per_byte = 1 / machine.disk_read_bytes_per_s.value + 1 / machine.disk_write_bytes_per_s.value
        every = self.bytes(units) * per_byte
        return every, max(every - per_byte * ring_bytes(self._sizes[index] for index in units), 0.0)
