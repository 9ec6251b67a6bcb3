"""Steps that are not finite, and losses that jump: what is skipped, when a run gives up, what it leaves to look at.

A step whose loss or gradient norm is not finite has updated nothing (the engine looks before it defers), so one is skipped and
counted. ``max_skipped_steps`` in a row mean that the model or the data is broken: the run stops, and
``skipped_batches.json`` names the rows. A loss far outside what it has been lately is only reported, with its rows: it
may be the data's fault, and it may heal. Checked by ``tests/trainer/test_guards.py``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from layerferry.data import StepBatch
from layerferry.engine.anomaly import NonFinite
from layerferry.engine.arrivals import SpoiltStep
from layerferry.engine.engine import StepReport
from layerferry.errors import LayerFerryError
from layerferry.trainer.output import OutputFolder
from layerferry.trainer.state import Totals

logger = logging.getLogger("layerferry.trainer")

SKIPPED = "skipped_batches.json"
SPIKE_SIGMAS = 8.0
MEMORY = 0.98
"""Weight that yesterday's mean keeps: about fifty steps."""
WARM_STEPS = 30
MOST_IDS_SHOWN = 16


class TooManySkips(LayerFerryError):
    """So many steps in a row were not finite that the weights may be spoilt."""


class SkipGuard:
    """Counts skipped steps in ``totals``. Written by the loop only."""

    def __init__(self, output: OutputFolder, most: int, totals: Totals, batches: Sequence[Mapping[str, Any]] = ()) -> None:
        """``batches``: those of the steps before, in a run that goes on."""
        self._output, self._most, self._totals = output, most, totals
        self.batches = [dict(batch) for batch in batches]
        """Of the steps in a row that were not finite."""

    def passed(self) -> None:
        """A step was finite."""
        self.batches.clear()

    def skipped(self, batch: StepBatch, report: StepReport) -> None:
        """A step was not; raises ``LayerFerryError`` where it is one too many."""
        totals = self._totals
        totals.skipped += 1
        reason = f"loss {report.loss:g}, gradient norm {report.grad_norm:g}"
        if not report.num_targets:
            reason = "no token of its rows is trained"
        self.batches.append({"after_step": totals.step, "epoch": batch.epoch, "reason": reason, "rows": batch.sample_ids})
        logger.warning("the step after step %d was skipped: %s; nothing was updated", totals.step, reason)
        if len(self.batches) <= self._most:
            return
        try:
            self._output.write_json(SKIPPED, {"batches": self.batches})
            where = f"their rows are in {self._output.path / SKIPPED}"
        except OSError as error:
            where = f"their rows could not be written ({error.strerror or error}); those of the last: {shown(batch.sample_ids)}"
        raise (TooManySkips if report.num_targets else LayerFerryError)(
            f"{len(self.batches)} steps in a row after step {totals.step} were not finite ({reason}); {where}. "
            "A lower learning_rate or more warm-up may help; detect_anomaly: true names the layer"
        )


class SpikeGuard:
    """A running mean and spread of the loss, and what lies far above."""

    def __init__(self) -> None:
        self._mean = self._variance = 0.0
        self._steps = 0

    def look(self, batch: StepBatch, report: StepReport, step: int) -> bool:
        """Whether ``report`` is a spike; it is reported, and does not count into the mean."""
        spread = math.sqrt(self._variance) + 0.01 * abs(self._mean)
        if self._steps >= WARM_STEPS and report.loss > self._mean + SPIKE_SIGMAS * spread:
            logger.warning(
                "step %d: the loss jumped to %.4f (lately %.4f), gradient norm %.3g; rows %s",
                *(step, report.loss, self._mean, report.grad_norm, shown(batch.sample_ids)),
            )
            return True
        share = max(1 - MEMORY, 1 / (self._steps + 1))
        difference = report.loss - self._mean
        self._mean += share * difference
        self._variance = (1 - share) * (self._variance + share * difference * difference)
        self._steps += 1
        return False


@contextmanager
def named_rows(batch: StepBatch) -> Iterator[None]:
    """What ``detect_anomaly`` finds inside, and a step that could not be skipped, is told with the batch's rows."""
    try:
        yield
    except NonFinite as error:
        raise LayerFerryError(f"detect_anomaly: {error}; rows {shown(batch.sample_ids)}") from error
    except SpoiltStep as error:
        raise SpoiltStep(f"{error}; its rows: {shown(batch.sample_ids)}") from error


def shown(sample_ids: list[int]) -> str:
    """Row numbers of the training set, not too many."""
    more = len(sample_ids) - MOST_IDS_SHOWN
    return ", ".join(map(str, sample_ids[:MOST_IDS_SHOWN])) + (f" and {more} more" if more > 0 else "")
