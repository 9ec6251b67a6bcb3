"""Where the time of a step goes, by lane: exposed waits always, and every span when a step is recorded.

A lane is timed by marks that the backend puts into it (CUDA events, or the host's clock), so a span is when the work *ran*,
not when it was queued. Marks are read after the step's one synchronisation and cost a few microseconds each. Spans of the
optimizer come from its own thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from layerferry.backends.base import Backend, Lane, Mark


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on a lane; seconds since the recorded step began."""

    lane: Lane
    name: str
    begin_s: float
    end_s: float


class Clock:
    """Owns the marks of the present step. ``span`` may be called from any thread, the rest from the sweeping one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._waits: list[tuple[str, Mark, Mark]] = []
        self._spans: list[tuple[Lane, str, Mark, Mark]] | None = None
        self._origin: tuple[Mark, Mark] | None = None

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Time that the compute lane stands still while the caller is inside, blocked or not, is booked under ``cause``."""
        before = self._backend.mark(Lane.COMPUTE)
        with self.span(Lane.COMPUTE, f"wait: {cause}"):
            yield
        self._waits.append((cause, before, self._backend.mark(Lane.COMPUTE)))

    def forget_waits(self) -> None:
        """What was booked so far is no step's."""
        self._waits = []

    def take_waits(self) -> dict[str, float]:
        """Seconds booked since they were taken or forgotten last, by cause. Call behind the step's synchronisation."""
        waits, self._waits = self._waits, []
        booked: dict[str, float] = {}
        for cause, before, after in waits:
            booked[cause] = booked.get(cause, 0.0) + after.since(before)
        return booked

    @contextmanager
    def span(self, lane: Lane, name: str) -> Iterator[None]:
        """Named work on ``lane``; free while nothing is recorded."""
        spans = self._spans
        if spans is None:
            yield
            return
        before = self._backend.mark(lane)
        yield
        spans.append((lane, name, before, self._backend.mark(lane)))

    def start_recording(self) -> None:
        """Record every span from here on; synchronises the device once, to tie its clock to the host's."""
        self._backend.synchronize()
        self._origin = (self._backend.mark(Lane.COMPUTE), self._backend.mark(Lane.HOST))
        self._spans = []

    def stop_recording(self) -> list[Span]:
        """The spans since ``start_recording``, by begin."""
        self._backend.synchronize()
        spans, self._spans = self._spans or [], None
        assert self._origin is not None
        device, host = self._origin
        found = []
        for lane, name, before, after in spans:
            origin = host if lane is Lane.HOST else device
            found.append(Span(lane, name, before.since(origin), after.since(origin)))
        return sorted(found, key=lambda span: span.begin_s)
