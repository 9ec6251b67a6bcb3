"""A recorded step: spans of every lane, shares by a closed formula, a trace that readers accept, a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerferry.backends.base import Lane
from layerferry.engine.clock import Span
from layerferry.trainer import timeline
from layerferry.trainer.output import OutputFolder

SPANS = [
    Span(Lane.UPLOAD, "layer.0", 0.0, 1.0),
    Span(Lane.UPLOAD, "layer.1", 1.0, 2.0),
    Span(Lane.COMPUTE, "wait: link", 0.0, 1.0),
    Span(Lane.COMPUTE, "layer.0", 1.0, 3.0),
    Span(Lane.COMPUTE, "layer.1", 2.5, 4.0),
    Span(Lane.DOWNLOAD, "layer.1", 3.5, 4.0),
]


def test_shares_count_overlap_once_and_waits_not_at_all() -> None:
    assert timeline.busy_shares(SPANS) == pytest.approx({"upload": 0.5, "compute": 0.75, "download": 0.125, "CPU optimizer": 0.0})


def test_the_trace_has_a_thread_for_every_lane() -> None:
    events = json.loads(timeline.trace(SPANS))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"upload", "compute", "download", "CPU optimizer"}
    done = [e for e in events if e["ph"] == "X"]
    assert len(done) == len(SPANS) and all(e["dur"] >= 0 for e in done)
    assert [e["ts"] for e in done if e["name"] == "layer.0"] == [0.0, 1e6]


def test_the_side_lane_has_a_row_where_it_has_run() -> None:
    spans = [*SPANS, Span(Lane.SIDE, "layer.0", 1.0, 2.0)]
    assert list(timeline.busy_shares(spans)) == ["upload", "compute", "download", "optimizer on the device", "CPU optimizer"]
    assert timeline.busy_shares(spans)["optimizer on the device"] == pytest.approx(0.25)


def test_the_picture_is_a_png() -> None:
    assert timeline.picture(SPANS, title="a step").startswith(b"\x89PNG")


def test_one_step_is_recorded_and_the_others_are_not(tmp_path: Path) -> None:
    class Clock:
        started = 0

        def start_recording(self) -> None:
            self.started += 1

        def stop_recording(self) -> list[Span]:
            return SPANS

    class Engine:
        clock = Clock()

    recorder = timeline.StepRecorder(Engine(), OutputFolder(tmp_path), 10)  # type: ignore[arg-type]
    for step in range(1, 11):
        with recorder.recording(step):
            pass
    assert Engine.clock.started == 1
    assert (tmp_path / "timeline.json").is_file() and (tmp_path / "timeline.png").is_file()
