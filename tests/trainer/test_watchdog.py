"""Each lane that stands still is named; one that moves, or has nothing to do, is not; the process ends with its stacks."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import pytest

from layerferry.trainer.watchdog import Lane, Watchdog

NAMES = ("checkpoint writer", "data loader", "optimizer", "device")


def watch(lanes: list[Lane], seconds: float, *, patience_s: float = 0.2) -> list[str]:
    """Names that a watchdog has called within ``seconds``."""
    called: list[str] = []
    told = threading.Event()

    def on_stall(stalled: list[Lane]) -> None:
        called.extend(lane.name for lane in stalled)
        told.set()

    with Watchdog(lanes, patience_s, on_stall):
        told.wait(seconds)
    return called


@pytest.mark.parametrize("name", NAMES)
def test_the_lane_that_has_not_moved(name: str) -> None:
    """One stands still although it is busy; the others move, or are idle."""
    lanes = [
        Lane(one, lambda one=one: one == name or one == NAMES[0], lambda one=one: 0 if one == name else time.monotonic_ns(), "")  # type: ignore[misc]
        for one in NAMES
    ]
    assert watch(lanes, 5) == [name]


def test_all_that_wait_are_named_in_the_order_of_cause() -> None:
    assert watch([Lane(name, lambda: True, lambda: 0, "") for name in NAMES], 5) == list(NAMES)


def test_the_cause_is_named_first_although_it_has_moved_last() -> None:
    position = 0
    cause, waits = Lane("cause", lambda: True, lambda: position, ""), Lane("waits", lambda: True, lambda: 0, "")
    dog = Watchdog([cause, waits], 8.0)
    assert [dog.stalled(now) for now in (100.0, 101.0)] == [[], []]
    position = 1  # seen at 102, two seconds after the other has stood still
    assert [dog.stalled(now) for now in (102.0, 107.9)] == [[], []]
    assert dog.stalled(108.0) == [cause, waits]
    position = 2
    assert dog.stalled(109.0) == [waits], "it works"


def test_patience_begins_when_a_lane_gets_busy() -> None:
    busy = False
    late = Lane("late", lambda: busy, lambda: 0, "")
    dog = Watchdog([late], 8.0)
    assert [dog.stalled(now) for now in (100.0, 150.0)] == [[], []]
    busy = True
    assert [dog.stalled(now) for now in (151.0, 157.9, 158.0)] == [[], [], [late]]


def test_a_process_that_was_stopped_has_not_stood_still() -> None:
    """Ctrl-Z for hours: the clock has gone on, and nobody could move."""
    times, looks, told = itertools.count(0.0, 10_000.0), itertools.count(), threading.Event()
    stands = Lane("stands", lambda: True, lambda: next(looks) and 0, "")
    with Watchdog([stands], 0.2, lambda _: told.set(), clock=lambda: next(times)):
        assert told.wait(10)
    assert next(looks) >= 5, "four looks are the patience, each of two intervals"


def test_no_patience_no_thread() -> None:
    before = threading.active_count()
    with Watchdog([Lane("x", lambda: True, lambda: 0, "")], 0.0):
        assert threading.active_count() == before


def test_the_process_ends_and_shows_where() -> None:
    code = (
        "import time, logging; logging.basicConfig()\n"
        "from layerferry.trainer.watchdog import Lane, Watchdog\n"
        "def stands_still(): time.sleep(600)\n"
        "with Watchdog([Lane('device', lambda: True, lambda: 0, 'Look at dmesg.')], 0.3): stands_still()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (
        "nothing has moved for 0.3 seconds (watchdog_minutes): device. Look at dmesg." in done.stderr
        and "in stands_still" in done.stderr
    )
