"""SIGINT, SIGTERM and SIGHUP while a run trains: the first one asks, the second one does not wait.

The first signal only sets a mark: the loop ends its step, saves, and raises ``Interrupted`` (exit code 130, 143 or 129). From
then on all of them have the system's own action, which needs no Python to run: a second one ends the process at once, even
inside a kernel, and the newest whole checkpoint is what is left. Earlier handlers come back on leaving.
Checked by ``tests/trainer/test_interrupts.py`` and ``tests/reliability/test_kill.py``.
"""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from layerferry.errors import Interrupted

logger = logging.getLogger("layerferry.trainer")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Asked at the keyboard, by the system, and by a terminal that goes away."""


class Interrupts:
    """A context manager; outside the main thread, where Python delivers no signals, it does nothing."""

    def __init__(self, doing: str = "finishing the step and saving") -> None:
        """``doing``: what a first signal does not stop, for the person who waits."""
        self._doing = doing
        self.received: int | None = None
        """The first signal that came."""
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        for one in self._before:
            signal.signal(one, signal.SIG_DFL)
        with suppress(RuntimeError):  # it may have come in the middle of a write to the same stream
            logger.warning("%s: %s; once more ends at once, unsaved", signal.Signals(number).name, self._doing)

    def error(self, how_to_go_on: str) -> Interrupted:
        """The exception that ends the run."""
        assert self.received is not None
        return Interrupted(f"{signal.Signals(self.received).name}: {how_to_go_on}", signal_number=self.received)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            heeded = [number for number in SIGNALS if number != signal.SIGHUP or not nohup]
            self._before = {number: signal.signal(number, self._handle) for number in heeded}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
