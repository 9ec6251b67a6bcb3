"""Skipped steps and jumping losses: what is counted, what is said, when it ends."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from layerferry.data import Cursor, StepBatch
from layerferry.engine.anomaly import NonFinite
from layerferry.engine.arrivals import SpoiltStep, taken_already
from layerferry.engine.engine import StepReport
from layerferry.errors import LayerFerryError
from layerferry.trainer.guards import SkipGuard, SpikeGuard, named_rows, shown
from layerferry.trainer.output import OutputFolder
from layerferry.trainer.state import Totals

BATCH = StepBatch(micro_batches=[], sample_ids=[3, 1, 4], cursor=Cursor(0, 3), epoch=0.5)


def report(loss: float, *, targets: int = 5) -> StepReport:
    times = {"seconds": 0.0, "exposed_optimizer_s": 0.0, "exposed_link_s": 0.0}
    return StepReport(loss=loss, grad_norm=1.0, num_targets=targets, num_tokens=9, skipped=loss != loss, **times)


def test_a_finite_step_begins_the_count_again(tmp_path: Path) -> None:
    totals = Totals(step=7)
    guard = SkipGuard(OutputFolder(tmp_path), 2, totals)
    for _ in range(3):
        guard.skipped(BATCH, report(float("nan")))
        guard.skipped(BATCH, report(float("nan")))
        assert len(guard.batches) == 2
        guard.passed()
    assert totals.skipped == 6 and not guard.batches
    assert list(tmp_path.iterdir()) == []


def test_rows_are_named_even_where_they_cannot_be_written(tmp_path: Path) -> None:
    guard = SkipGuard(OutputFolder(tmp_path / "vanished"), 0, Totals())
    with pytest.raises(LayerFerryError, match=r"rows could not be written \(No such file.*those of the last: 3, 1, 4"):
        guard.skipped(BATCH, report(float("nan")))


def test_a_step_without_targets_says_so(tmp_path: Path) -> None:
    with pytest.raises(LayerFerryError, match="no token of its rows is trained"):
        SkipGuard(OutputFolder(tmp_path), 0, Totals()).skipped(BATCH, report(float("nan"), targets=0))


def test_a_jump_is_told_with_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    guard = SpikeGuard()
    with caplog.at_level(logging.WARNING, "layerferry"):
        assert not any(guard.look(BATCH, report(3 - step / 100 + step % 3 / 10), step) for step in range(100))
        assert not guard.look(BATCH, report(2.6), 100)
        assert guard.look(BATCH, report(7.0), 101)
        assert guard.look(BATCH, report(7.0), 102), "a spike does not lift the mean"
    assert "step 101: the loss jumped to 7.0000 (lately 2." in caplog.text and "rows 3, 1, 4" in caplog.text


def test_a_step_that_could_not_be_skipped_is_told_with_its_rows() -> None:
    with pytest.raises(SpoiltStep, match=r"step 8 was not finite .* its rows: 3, 1, 4"), named_rows(BATCH):
        raise taken_already(8, float("nan"), 1.0)


def test_the_first_steps_are_no_jump() -> None:
    guard = SpikeGuard()
    assert not any(guard.look(BATCH, report(loss), 0) for loss in (1.0, 50.0, 3.0, 900.0))


def test_anomalies_are_told_with_their_rows() -> None:
    with (
        pytest.raises(LayerFerryError, match="detect_anomaly: the output of layer.3 .* rows 3, 1, 4"),
        named_rows(BATCH),
    ):
        raise NonFinite("the output of layer.3 is not finite")


def test_many_rows_are_not_all_shown() -> None:
    assert shown([*range(20)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 4 more"
