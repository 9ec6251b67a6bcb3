"""SIGINT and SIGTERM while a run trains: the first one asks, the second one does not wait.

The first signal only sets a mark: the loop ends its step, saves, and raises ``Interrupted`` (exit code 130 or 143). From then
on both signals have the system's own action, which needs no Python to run: a second one ends the process at once, even
inside a kernel, and the newest whole checkpoint is what is left. Earlier handlers come back on leaving.
Checked by ``tests/trainer/test_interrupts.py`` and ``tests/reliability/test_kill.py``.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from layerferry.errors import Interrupted

logger = logging.getLogger("layerferry.trainer")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context manager; outside the main thread, where Python delivers no signals, it does nothing."""

    def __init__(self) -> None:
        self.received: int | None = None
        """The first signal that came."""
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        for one in SIGNALS:
            signal.signal(one, signal.SIG_DFL)
        logger.warning("%s: finishing the step and saving; once more ends at once, unsaved", signal.Signals(number).name)

    def error(self, how_to_go_on: str) -> Interrupted:
        """The exception that ends the run."""
        assert self.received is not None
        return Interrupted(f"{signal.Signals(self.received).name}: {how_to_go_on}", signal_number=self.received)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
