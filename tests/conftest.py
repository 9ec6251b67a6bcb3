"""What every test may count on, however the suite was started."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Signals have the system's own action: a suite under ``nohup``, or in a shell's background, begins with some ignored."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
