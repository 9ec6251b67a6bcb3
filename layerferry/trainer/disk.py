"""The disk tier while a run goes on: whether it keeps up with the plan, and what it has cost by the end.

A disk that throttles, fills up or is shared is slower than its probe, and steps then wait for updates without a word. So the
seconds in which the disk had something to do are held against those that the plan's rates give for the same bytes; beyond
``SLOWER`` times, one line names it. Less than what a measurement of those rates moves is no rate: a few small units take the time
of their system calls, whatever the disk. Writes wear a disk out, so their sum is said at the end.
Checked by ``tests/trainer/test_disk.py``.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from layerferry.plan import size_text
from layerferry.planner.disk_rates import NUM_UNITS, UNIT_BYTES
from layerferry.planner.machine import Machine
from layerferry.trainer.watchdog import Lane

SLOWER = 2.0
STEPS = 3
"""Over which a disk must be that slow to be named."""
LEAST_BYTES = NUM_UNITS * UNIT_BYTES
"""That must be moved in them: as many as the measurement writes, or reads."""

logger = logging.getLogger("layerferry.trainer")


class Tier(Protocol):
    """What is asked of ``store.disk.DiskTier``."""

    bytes_read: int
    bytes_written: int

    @property
    def folder(self) -> str: ...

    @property
    def busy_s(self) -> float: ...

    @property
    def is_busy(self) -> bool: ...


class DiskWatch:
    """Of one run. Called by the training loop only."""

    def __init__(self, tier: Tier, machine: Machine) -> None:
        self._tier, self._machine = tier, machine
        self._seen = deque([self._now()], maxlen=STEPS + 1)
        self._has_warned = False

    def _now(self) -> tuple[int, int, float]:
        return self._tier.bytes_read, self._tier.bytes_written, self._tier.busy_s

    def step_done(self) -> None:
        """Look at the last steps; warn once in a run."""
        self._seen.append(self._now())
        if len(self._seen) <= STEPS or self._has_warned:
            return
        read, written, busy_s = (after - before for before, after in zip(self._seen[0], self._seen[-1], strict=True))
        rates = self._machine.disk_read_bytes_per_s, self._machine.disk_write_bytes_per_s
        planned_s = read / rates[0].value + written / rates[1].value
        if read + written >= LEAST_BYTES and busy_s > SLOWER * planned_s:
            self._has_warned = True
            moved = (read + written) / 1e9
            logger.warning(
                "the disk at %s moves %.2f GB/s, the plan counted on %.2f (%s): updates may wait for it. Is it shared, hot or "
                "nearly full? `layerferry probe --disk FOLDER` measures it for the next plan",
                *(self._tier.folder, moved / busy_s, moved / planned_s, rates[1].source),
            )

    def summary(self) -> str:
        """What the tier has moved in this process."""
        read, written = size_text(self._tier.bytes_read), size_text(self._tier.bytes_written)
        return f"disk tier: {written} written to {self._tier.folder}, {read} read"

    def lane(self) -> Lane:
        """For the watchdog."""
        tier = self._tier
        return Lane(
            "disk tier",
            lambda: tier.is_busy,
            lambda: tier.bytes_read + tier.bytes_written,
            f"Is the disk of {tier.folder} alive?",
        )
