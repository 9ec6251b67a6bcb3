"""What a person sees: fields, cutting to the terminal, and log records above the live line."""

from __future__ import annotations

import io
import logging
from dataclasses import replace

import pytest

from layerferry.trainer.progress import LiveLine, PlainLog, View, bar, counter, host_resident_bytes, progress

VIEW = View(
    step=12,
    total_steps=48,
    epoch=0.85,
    loss=9.87654,
    mean_loss=1.23456,
    grad_norm=3.21,
    lr=1.2e-4,
    tokens_per_s=12345.6,
    mfu=0.478,
    device_bytes=3 * 2**30,
    host_bytes=2**31,
    eta_s=83.2,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_number_is_shown() -> None:
    line = VIEW.log_line()
    assert line == (
        "step 12/48, epoch 0.85: loss 1.2346, lr 1.20e-04, grad norm 3.21, 12,346 tokens/s, ETA 0:01:23, MFU 47.8%, "
        "device 3.00 GiB, host 2.00 GiB"
    )


def test_on_the_cpu_neither_device_nor_mfu() -> None:
    line = replace(VIEW, mfu=None, device_bytes=0).log_line()
    assert "MFU" not in line and "device" not in line and "host 2.00 GiB" in line


def test_no_remaining_time_while_it_is_not_known() -> None:
    assert "ETA" not in replace(VIEW, eta_s=None).log_line()


@pytest.mark.parametrize("columns", [20, 40, 61, 80, 120, 200])
def test_live_line_fits(columns: int) -> None:
    line = VIEW.live_line(columns)
    assert len(line) < columns
    assert line.startswith("12/48 ")
    assert ("loss 9.8765" in line) == (columns >= 40)
    assert ("host 2.00 GiB" in line) == (columns >= 140)


def test_bar() -> None:
    assert bar(0.0).count("━") == 0 and bar(0.5).count("━") == 8 and bar(1.0).count("━") == bar(2.0).count("━") == 16


def test_a_log_record_clears_the_live_line() -> None:
    out = Terminal()
    handler = logging.StreamHandler(out)
    logger = logging.getLogger("layerferry")
    logger.addHandler(handler)
    try:
        with progress(plain=None, stream=out) as shown:
            assert isinstance(shown, LiveLine)
            shown.step(VIEW, logs=False)
            logger.warning("saved something")
        assert handler.filters == []
    finally:
        logger.removeHandler(handler)
    text = out.getvalue()
    assert "\r\x1b[Ksaved something\n" in text


def test_the_last_line_stays() -> None:
    out = Terminal()
    with progress(plain=None, stream=out) as shown:
        shown.step(VIEW, logs=False)
    assert out.getvalue().endswith("\n") and "12/48" in out.getvalue()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("I/O operation on closed file")])
def test_a_terminal_that_has_gone_away_does_not_end_the_run(error: Exception) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise error

    with progress(plain=None, stream=Gone()) as shown:
        shown.activity("loading")
        shown.step(VIEW, logs=True)


def test_what_went_on_before_the_first_step_goes() -> None:
    out = Terminal()
    with progress(plain=None, stream=out) as shown:
        shown.activity(counter(0, 48))
    assert out.getvalue().startswith("\r\x1b[K0/48 ") and out.getvalue().endswith("\r\x1b[K")


def test_plain_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    for plain, stream in ((None, io.StringIO()), (True, Terminal())):
        with progress(plain=plain, stream=stream) as shown, caplog.at_level(logging.INFO, "layerferry"):
            assert isinstance(shown, PlainLog)
            shown.step(VIEW, logs=False)
            shown.activity("saving")
            shown.step(VIEW, logs=True)
        assert stream.getvalue() == ""
        assert [record.getMessage() for record in caplog.records] == [VIEW.log_line()]
        caplog.clear()


def test_host_resident_bytes() -> None:
    assert 2**24 < host_resident_bytes() < 2**40
