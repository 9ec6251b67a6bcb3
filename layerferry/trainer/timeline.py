"""One recorded step as a trace (Chrome and Perfetto read it) and as a picture with a row per lane.

Times are those at which the lanes *ran* the work (device events; the host's clock for the CPU optimizer). The shares beside
each lane are its busy and its idle time over the step. Waits of the compute lane are drawn hollow and count as idle.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from layerferry.backends.base import Lane
from layerferry.checkpoint.files import reason_of
from layerferry.engine.clock import Span
from layerferry.engine.engine import Engine
from layerferry.trainer.output import OutputFolder
from layerferry.trainer.plots import png

ROWS = (
    (Lane.UPLOAD, "upload"),
    (Lane.COMPUTE, "compute"),
    (Lane.DOWNLOAD, "download"),
    (Lane.SIDE, "optimizer on the device"),
    (Lane.HOST, "CPU optimizer"),
)
COLOURS = {
    Lane.UPLOAD: "#4477aa",
    Lane.COMPUTE: "#228833",
    Lane.DOWNLOAD: "#aa3377",
    Lane.SIDE: "#66ccee",
    Lane.HOST: "#ccbb44",
}
WAIT = "wait: "
RECORDED_STEP = 4
"""Of this process: by then every shape is compiled, and the step before has left updates to hide."""

logger = logging.getLogger("layerferry.trainer")


class StepRecorder:
    """Records one step of a run, an early one that is past compilation, into ``output``; with None, nothing."""

    def __init__(self, engine: Engine, output: OutputFolder | None, total_steps: int) -> None:
        self._engine, self._output, self._last_step = engine, output, total_steps
        self._taken = 0

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Around step number ``step`` (from 1)."""
        self._taken += 1
        due = self._taken == RECORDED_STEP or (step == self._last_step and self._taken < RECORDED_STEP)
        if self._output is None or not due:
            yield
            return
        self._engine.clock.start_recording()
        try:
            yield
        except BaseException:
            self._engine.clock.stop_recording()
            raise
        spans = self._engine.clock.stop_recording()
        try:
            self._output.write("timeline.json", trace(spans))
            title = f"step {step}: {spans[-1].end_s - spans[0].begin_s:.2f} s"
            self._output.write("timeline.png", picture(spans, title=title))
        except OSError as error:
            logger.error("the timeline of step %d cannot be written: %s; training goes on", step, reason_of(error))
        else:
            logger.info("timeline of step %d: %s", step, self._output.path / "timeline.png")


def rows_of(spans: Sequence[Span]) -> list[tuple[Lane, str]]:
    """Lanes and their names; the side lane only where something has run on it, as few optimizers do."""
    return [(lane, name) for lane, name in ROWS if lane is not Lane.SIDE or any(span.lane is lane for span in spans)]


def busy_shares(spans: Sequence[Span]) -> dict[str, float]:
    """Lane name -> share of the recorded time in which it ran something; overlapping spans count once."""
    begin, end = min(s.begin_s for s in spans), max(s.end_s for s in spans)
    shares = {}
    for lane, name in rows_of(spans):
        busy, reached = 0.0, begin
        for span in sorted((s for s in spans if s.lane is lane and not s.name.startswith(WAIT)), key=lambda s: s.begin_s):
            busy += max(0.0, span.end_s - max(span.begin_s, reached))
            reached = max(reached, span.end_s)
        shares[name] = busy / (end - begin) if end > begin else 0.0
    return shares


def trace(spans: Sequence[Span]) -> bytes:
    """The trace-event format: one process, one thread a lane, complete events in microseconds."""
    rows = rows_of(spans)
    numbers = {lane: number for number, (lane, _) in enumerate(rows)}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": numbers[lane], "args": {"name": name}} for lane, name in rows
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": 1,
            "tid": numbers[span.lane],
            "ts": round(span.begin_s * 1e6, 3),
            "dur": round((span.end_s - span.begin_s) * 1e6, 3),
        }
        for span in spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode("utf-8")


def picture(spans: Sequence[Span], *, title: str) -> bytes:
    """A PNG with a row for each lane."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shares, rows = busy_shares(spans), rows_of(spans)
    for row, (lane, _) in enumerate(rows):
        own = [span for span in spans if span.lane is lane]
        for waits in (False, True):
            bars = [(s.begin_s, s.end_s - s.begin_s) for s in own if s.name.startswith(WAIT) is waits]
            axes.broken_barh(
                bars,
                (row - 0.36, 0.72),
                facecolor="none" if waits else COLOURS[lane],
                edgecolor="#bb5566" if waits else "white",
                linewidth=0.8 if waits else 0.3,
            )
    axes.set_yticks(range(len(rows)), [f"{name}\n{shares[name]:.0%} busy, {1 - shares[name]:.0%} idle" for _, name in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the step began")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    return png(figure)
