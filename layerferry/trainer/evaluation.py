"""The loss on held-out rows: the token mean over each evaluation set.

Rows are collated group by group, so host memory does not grow with the set; the engine keeps logits in chunks of its own.
Checked by ``tests/trainer/test_loop.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from layerferry.data import Sample, eval_batches
from layerferry.engine.batch import MicroBatch

GROUP = 16
"""Micro-batches that are handed to the engine together: layers are streamed once for all of them."""


class EvalReport(Protocol):
    """What the engine says of a group."""

    @property
    def loss(self) -> float: ...

    @property
    def num_targets(self) -> int: ...


class Evaluator(Protocol):
    """What is asked of the engine here."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalReport: ...


def evaluate(
    engine: Evaluator, sets: Mapping[str, Sequence[Sample]], *, rows: int, pad_id: int, show: Callable[[str], None]
) -> dict[str, float]:
    """Metrics under Hugging Face's names: ``eval_loss``, or ``eval_<name>_loss`` where the sets have names of their own."""
    metrics: dict[str, float] = {}
    for name, samples in sets.items():
        prefix = "eval" if name == "eval" else f"eval_{name}"
        begin = time.monotonic()
        metrics[f"{prefix}_loss"] = _mean_loss(engine, samples, rows, pad_id, show)
        seconds = max(time.monotonic() - begin, 1e-9)
        metrics[f"{prefix}_runtime"] = round(seconds, 4)
        metrics[f"{prefix}_samples_per_second"] = round(len(samples) / seconds, 3)
        metrics[f"{prefix}_steps_per_second"] = round(math.ceil(len(samples) / rows) / seconds, 3)
    return metrics


def _mean_loss(engine: Evaluator, samples: Sequence[Sample], rows: int, pad_id: int, show: Callable[[str], None]) -> float:
    batches = eval_batches(samples, rows, pad_id)
    total, targets, done = 0.0, 0, 0
    while group := list(islice(batches, GROUP)):
        report = engine.evaluate(group)
        if report.num_targets:
            total += report.loss * report.num_targets
            targets += report.num_targets
        done += sum(len(micro_batch.input_ids) for micro_batch in group)
        show(f"evaluating: {done}/{len(samples)} rows")
    return total / targets if targets else math.nan
