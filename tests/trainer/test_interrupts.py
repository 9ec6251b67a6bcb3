"""The first signal is a mark, the second has the system's own action; earlier handlers come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from layerferry.trainer.interrupts import SIGNALS, Interrupts


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_is_a_mark(number: int, code: int) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with Interrupts() as interrupts:
        assert interrupts.received is None
        os.kill(os.getpid(), number)
        assert interrupts.received == number
        assert [signal.getsignal(one) for one in SIGNALS] == [signal.SIG_DFL] * 3
        assert interrupts.error("go on").exit_code == code
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.received is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.received == signal.SIGTERM and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with Interrupts() as interrupts:
            seen.append((interrupts.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
