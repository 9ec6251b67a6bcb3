"""No hang without a name: a thread that knows what must move, and ends a run in which it does not.

A lane is something that works for the run (checkpoint writer, data loader, optimizer, device) with a counter that moves while it
works. A lane that is busy and has not moved for the whole patience stands still; the lanes are asked in the order of who
waits for whom, so the first name is the likeliest cause. Waiting threads cannot be woken from outside (they may sit in a
driver or in a dead network disk), so the process ends: stacks go to standard error, the newest whole checkpoint
stays. Checked by ``tests/trainer/test_watchdog.py``.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

logger = logging.getLogger("layerferry.trainer")


@dataclass(frozen=True, slots=True)
class Lane:
    """``position`` moves while the lane works; ``is_busy`` says whether it has to."""

    name: str
    is_busy: Callable[[], bool]
    position: Callable[[], int]
    advice: str


class Watchdog:
    """Watches ``lanes`` until it is closed; ``patience_s`` 0: not at all."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        patience_s: float,
        on_stall: Callable[[list[Lane]], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lanes, self._patience_s = tuple(lanes), patience_s
        self._on_stall = on_stall or (lambda stalled: end_process(stalled, patience_s))
        self._clock = clock
        self._moved = {lane.name: (-1, clock()) for lane in self._lanes}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def _run(self) -> None:
        interval_s = min(self._patience_s / 8, 5.0)
        now = seen = self._clock()
        while not self._stop.wait(interval_s):
            before, seen = seen, self._clock()
            now += min(seen - before, 2 * interval_s)  # Ctrl-Z stops everybody: what nobody could use is no standstill
            if stalled := self.stalled(now):
                self._on_stall(stalled)
                return

    def stalled(self, now: float) -> list[Lane]:
        """Look at all lanes at the time ``now``, in seconds: those that stand still where one has done so for the whole patience,
        else none."""
        standing: list[tuple[Lane, float]] = []
        for lane in self._lanes:
            position, since = self._moved[lane.name]
            found = lane.position()
            if found != position or not lane.is_busy():
                self._moved[lane.name] = (found, now)
            else:
                standing.append((lane, now - since))
        if all(seconds < self._patience_s for _, seconds in standing):
            return []
        # whoever is waited for may have moved last: a disk has written what the optimizer gave it before both stood still
        return [lane for lane, seconds in standing if seconds >= self._patience_s / 2]

    def __enter__(self) -> Watchdog:
        if self._patience_s > 0:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


def end_process(stalled: Sequence[Lane], patience_s: float) -> None:
    """Say who stands still, show where, and end."""
    names = ", then ".join(lane.name for lane in stalled)
    patience = f"{patience_s / 60:.3g} minutes" if patience_s >= 120 else f"{patience_s:.3g} seconds"
    logger.error("nothing has moved for %s (watchdog_minutes): %s. %s", patience, names, stalled[0].advice)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)
