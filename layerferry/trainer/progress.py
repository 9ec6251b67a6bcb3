"""What a person sees while a run goes on, on standard error.

On a terminal one live line that is redrawn after every step; elsewhere one log line per logging step. Both render the
same ``View``. Every record of the project's logger first clears the live line, so notes (an evaluation, a checkpoint)
scroll by above it. Leaves out: files (``history``). Checked by ``tests/trainer/test_progress.py``.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from layerferry.plan import size_text
from layerferry.trainer.history import clock_time

logger = logging.getLogger("layerferry.trainer")

BAR_COLUMNS = 16
CLEAR = "\r\x1b[K"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One step, as it is shown."""

    step: int
    total_steps: int
    epoch: float
    loss: float
    mean_loss: float
    """Mean since the last log line: what is logged."""
    grad_norm: float
    lr: float
    tokens_per_s: float
    """Real tokens, padding not counted."""
    mfu: float | None
    """Model-FLOP/s over the device's matmul rate; None where that rate is not known."""
    device_bytes: int
    """Peak; 0 where the device is the host."""
    host_bytes: int
    """Resident."""
    eta_s: float | None
    """None: not known yet."""

    def fields(self, loss: float) -> list[str]:
        """The numbers, most wanted first: a narrow terminal cuts from the right."""
        parts = [
            f"loss {loss:.4f}",
            f"lr {self.lr:.2e}",
            f"grad norm {self.grad_norm:.3g}",
            f"{self.tokens_per_s:,.0f} tokens/s",
        ]
        if self.eta_s is not None:
            parts.append(f"ETA {clock_time(self.eta_s)}")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.device_bytes:
            parts.append(f"device {size_text(self.device_bytes)}")
        parts.append(f"host {size_text(self.host_bytes)}")
        return parts

    def log_line(self) -> str:
        """The plain line."""
        return f"step {self.step}/{self.total_steps}, epoch {self.epoch:.2f}: " + ", ".join(self.fields(self.mean_loss))

    def live_line(self, columns: int) -> str:
        """The live line, cut to the terminal at a whole field."""
        line = counter(self.step, self.total_steps)
        for part in self.fields(self.loss):
            if len(line) + 2 + len(part) >= columns:
                break
            line += "  " + part
        return line[: columns - 1]


class Progress(Protocol):
    """Where steps are shown."""

    def step(self, view: View, *, logs: bool) -> None:
        """A step is done; ``logs`` says that it is a logging step."""
        ...

    def activity(self, text: str) -> None:
        """What goes on between steps."""
        ...


class PlainLog:
    """A line per logging step."""

    def step(self, view: View, *, logs: bool) -> None:
        if logs:
            logger.info(view.log_line())

    def activity(self, text: str) -> None:
        """Nothing: the result is logged when it is there."""


class LiveLine:
    """One line that is drawn over again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_drawn = False
        self._last_step = ""

    def step(self, view: View, *, logs: bool) -> None:
        self._last_step = view.live_line(_columns())
        self._draw(self._last_step)

    def activity(self, text: str) -> None:
        self._draw(text[: _columns() - 1])

    def clear(self) -> None:
        """Leave the row empty."""
        if self._is_drawn:
            self._write(CLEAR)
            self._is_drawn = False

    def finish(self) -> None:
        """Leave the last step standing; what went on before the first one goes."""
        if self._last_step:
            self._draw(self._last_step)
            self._write("\n")
            self._is_drawn = False
            self._last_step = ""
        else:
            self.clear()

    def _draw(self, text: str) -> None:
        self._write(CLEAR + text)
        self._is_drawn = True

    def _write(self, text: str) -> None:
        """A terminal that has gone away is no reason to stop training, or not to save."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


@contextmanager
def progress(*, plain: bool | None, stream: TextIO | None = None) -> Iterator[Progress]:
    """The progress of a run; ``plain`` None: a live line where standard error is a terminal."""
    out = sys.stderr if stream is None else stream
    if plain or not out.isatty():
        yield PlainLog()
        return
    line = LiveLine(out)

    def make_room(_record: logging.LogRecord) -> bool:
        line.clear()
        return True

    handlers = list(logging.getLogger("layerferry").handlers)
    for handler in handlers:
        handler.addFilter(make_room)
    try:
        yield line
    finally:
        line.finish()
        for handler in handlers:
            handler.removeFilter(make_room)


def counter(step: int, total_steps: int) -> str:
    """Steps done, with the bar."""
    return f"{step}/{total_steps} {bar(step / total_steps)}"


def bar(share: float) -> str:
    """A bar of fixed width, filled to ``share``."""
    filled = round(min(max(share, 0.0), 1.0) * BAR_COLUMNS)
    return "━" * filled + "─" * (BAR_COLUMNS - filled)


def host_resident_bytes() -> int:
    """Resident set of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _columns() -> int:
    return shutil.get_terminal_size().columns
