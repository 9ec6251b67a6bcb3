"""The training loop: steps, and what is due between them.

It owns no mathematics: the engine takes a step over a list of micro-batches at a learning rate and says what it was.
A step whose loss or gradient is not finite has updated nothing; its rows are used up, but neither the step number nor
the schedule advances. Checked by ``tests/trainer/test_loop.py`` with an engine that only pretends, and by
``tests/trainer/test_train.py`` with the real one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from layerferry.config import Config
from layerferry.data import Cursor, DataSets, Prefetch, Sampler, StepBatch, step_batches
from layerferry.engine.engine import Engine, StepReport
from layerferry.errors import LayerFerryError
from layerferry.optim.schedule import Schedule
from layerferry.trainer.cadence import Cadence
from layerferry.trainer.checkpoints import Checkpoints
from layerferry.trainer.evaluation import evaluate
from layerferry.trainer.history import Entry, History
from layerferry.trainer.meter import Meter, Work, model_flops
from layerferry.trainer.progress import Progress, View, host_resident_bytes
from layerferry.trainer.reporters import Reporter

logger = logging.getLogger("layerferry.trainer")

MOST_SKIPPED = 10
"""Steps in a row that may be skipped."""


@dataclass(kw_only=True)
class Totals:
    """Sums over a run, and since the last log line. Written by the loop only."""

    step: int = 0
    skipped_in_a_row: int = 0
    loss: float = 0.0
    samples: int = 0
    window_loss: float = 0.0
    window_steps: int = 0


@dataclass(kw_only=True)
class Loop:
    """One run over the training set, from its first step to its last."""

    config: Config
    engine: Engine
    tokenizer: Any
    data: DataSets
    sampler: Sampler
    schedule: Schedule
    cadence: Cadence
    history: History
    checkpoints: Checkpoints
    reporters: list[Reporter]
    progress: Progress
    meter: Meter
    flops_per_token: Callable[[float], float]
    """Model FLOPs of a token in a row of so many."""
    totals: Totals = field(default_factory=Totals)
    last_eval: tuple[int, dict[str, float]] | None = None
    """Step and metrics of the newest evaluation."""

    def run(self) -> dict[str, float]:
        """Take every step; return Hugging Face's training metrics."""
        source = step_batches(self.data.train, self.sampler, Cursor(), self.engine.plan.micro_batch_rows, self.data.pad_id)
        self.history.restart_clock()
        epoch = 0.0
        with Prefetch(source) as batches:
            while self.totals.step < self.cadence.total_steps:
                epoch = self._one(batches)
        return self._finish(epoch)

    def _one(self, batches: Prefetch[StepBatch]) -> float:
        begin = time.monotonic()
        batch = next(batches)
        lr = self.schedule.lr_at(self.totals.step + 1)
        report = self.engine.step(batch.micro_batches, lr=lr)
        if report.skipped:
            self._skip(report)
            return batch.epoch
        totals = self.totals
        totals.step += 1
        totals.skipped_in_a_row = 0
        totals.samples += len(batch.sample_ids)
        totals.loss += report.loss
        totals.window_loss += report.loss
        totals.window_steps += 1
        flops = model_flops(batch.micro_batches, self.flops_per_token)
        self.history.tokens_seen += report.num_tokens
        self.history.total_flops += flops
        self.meter.add(Work(report.num_tokens, flops, time.monotonic() - begin))
        due = self.cadence.after(totals.step, ends_epoch=batch.cursor.position == 0)
        view = self._view(report, lr, batch.epoch)
        self.progress.step(view, logs=due.log)
        if due.log:
            totals.window_loss, totals.window_steps = 0.0, 0
            self._record({"loss": view.mean_loss, "grad_norm": view.grad_norm, "learning_rate": lr}, batch.epoch)
        if due.evaluate:
            self.evaluate(batch.epoch)
        if due.save:
            self.progress.activity(f"saving checkpoint-{totals.step}")
            self.checkpoints.save(totals.step, self.engine, self.tokenizer, self.history)
        return batch.epoch

    def _skip(self, report: StepReport) -> None:
        self.totals.skipped_in_a_row += 1
        after = self.totals.step
        if not report.num_targets:
            reason = "no token of its rows is trained"
        else:
            reason = f"loss {report.loss:g}, gradient norm {report.grad_norm:g}"
        if self.totals.skipped_in_a_row > MOST_SKIPPED:
            raise LayerFerryError(
                f"{self.totals.skipped_in_a_row} steps in a row after step {after} were not finite ({reason}); "
                "a lower learning_rate or more warm-up may help"
            )
        logger.warning("the step after step %d was skipped: %s; nothing was updated", after, reason)

    def _view(self, report: StepReport, lr: float, epoch: float) -> View:
        return View(
            step=self.totals.step,
            total_steps=self.cadence.total_steps,
            epoch=epoch,
            loss=report.loss,
            mean_loss=self.totals.window_loss / self.totals.window_steps,
            grad_norm=report.grad_norm,
            lr=lr,
            tokens_per_s=self.meter.tokens_per_s,
            mfu=self.meter.mfu,
            device_bytes=self.engine.backend.peak_bytes(),
            host_bytes=host_resident_bytes(),
            eta_s=self.meter.seconds_per_step * (self.cadence.total_steps - self.totals.step),
        )

    def evaluate(self, epoch: float) -> dict[str, float]:
        """Measure the loss on the evaluation sets and record it; a second call at one step measures nothing."""
        if self.last_eval is None or self.last_eval[0] != self.totals.step:
            rows = min(self.config.train.per_device_eval_batch_size, self.engine.plan.micro_batch_rows)
            metrics = evaluate(self.engine, self.data.eval, rows=rows, pad_id=self.data.pad_id, show=self.progress.activity)
            self._record(metrics, epoch)
            losses = ", ".join(f"{key} {value:.4f}" for key, value in metrics.items() if key.endswith("loss"))
            logger.info("step %d/%d: %s", self.totals.step, self.cadence.total_steps, losses)
            self.last_eval = (self.totals.step, metrics)
            self.schedule.observe(next(value for key, value in metrics.items() if key.endswith("loss")))
        return {**self.last_eval[1], "epoch": epoch}

    def _finish(self, epoch: float) -> dict[str, float]:
        self.engine.settle()
        seconds = max(self.history.elapsed_s, 1e-9)
        steps = max(self.totals.step, 1)
        metrics = {
            "total_flos": self.history.total_flops,
            "train_loss": self.totals.loss / steps,
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(self.totals.samples / seconds, 3),
            "train_steps_per_second": round(self.totals.step / seconds, 3),
        }
        entry = self._record(metrics, epoch)
        return {key: value for key, value in entry.items() if key != "step"}

    def _record(self, metrics: dict[str, float], epoch: float) -> Entry:
        entry = self.history.add(metrics, step=self.totals.step, epoch=epoch)
        for reporter in self.reporters:
            reporter.report(entry)
        return entry
