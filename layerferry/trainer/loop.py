"""The training loop: steps, and what is due between them.

It owns no mathematics: the engine takes a step over a list of micro-batches at a learning rate and says what it was.
A step whose loss or gradient is not finite has updated nothing; its rows are used up, but neither the step number nor
the schedule advances; where it ends an epoch, what is due there is done. A signal is heeded between two steps. What a later
process needs is ``state``.
Checked by ``tests/trainer/test_loop.py`` with an engine that only pretends, and by
``tests/trainer/test_train.py`` with the real one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layerferry.config import Config
from layerferry.data import Cursor, DataSets, Prefetch, Sampler, StepBatch, step_batches
from layerferry.engine.anomaly import check_norms
from layerferry.engine.arrivals import HalfTakenStep, SpoiltStep
from layerferry.engine.engine import Engine, StepReport
from layerferry.errors import LayerFerryError, PlanError
from layerferry.optim.schedule import Schedule
from layerferry.trainer.cadence import Cadence, Due
from layerferry.trainer.checkpoints import WITHOUT, Checkpoints, behind_a_spoilt_step, how_to_go_on
from layerferry.trainer.disk import DiskWatch
from layerferry.trainer.evaluation import evaluate
from layerferry.trainer.guards import SkipGuard, SpikeGuard, TooManySkips, named_rows
from layerferry.trainer.history import Entry, History
from layerferry.trainer.interrupts import Interrupts
from layerferry.trainer.meter import Meter, Work, model_flops
from layerferry.trainer.output import OutputFolder
from layerferry.trainer.progress import Progress, View, counter, host_resident_bytes
from layerferry.trainer.reporters import Reporter
from layerferry.trainer.rounding import rounding_of
from layerferry.trainer.state import RunState, Totals, data_facts, eval_facts, settings_of
from layerferry.trainer.timeline import StepRecorder
from layerferry.trainer.watchdog import Lane

logger = logging.getLogger("layerferry.trainer")


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
    output: OutputFolder
    history: History
    checkpoints: Checkpoints
    reporters: list[Reporter]
    progress: Progress
    meter: Meter
    recorder: StepRecorder
    flops_per_token: Callable[[float], float]
    """Model FLOPs of a token in a row of so many."""
    cursor: Cursor = field(default_factory=Cursor)
    """Behind the last row that was used."""
    totals: Totals = field(default_factory=Totals)
    last_eval: tuple[int, dict[str, float]] | None = None
    """Step and metrics of the newest evaluation."""
    skipped_batches: Sequence[Mapping[str, Any]] = ()
    """Of the steps before, as far as they were skipped."""
    waits_for: str | None = None
    """The lane that this thread waits for now."""
    disk: DiskWatch | None = None
    """None: nothing is @disk."""
    retreat: Callable[[str, int], None] | None = None
    """Gives the engine a smaller plan, or raises: for a "step" or an "evaluation" that has run out of device memory, after so
    many of them; None: that is the end."""

    def __post_init__(self) -> None:
        train = self.config.train
        self._skips = SkipGuard(self.output, train.max_skipped_steps, self.totals, self.skipped_batches)
        self._spikes = SpikeGuard()
        self._first_step = self.totals.step
        self.history.step, self.history.epoch = self.totals.step, self.sampler.epochs_done(self.cursor)
        self._num_evaluated = self._num_evaluations = 0
        self.interrupts = Interrupts()
        """Of the steps: a signal in the last one ends the run when the model is saved."""

    @property
    def steps_taken(self) -> int:
        """By this process."""
        return self.totals.step - self._first_step

    def run(self) -> dict[str, float]:
        """Take every step; return Hugging Face's training metrics."""
        self.history.restart_clock()
        if self.totals.step < self.cadence.total_steps:
            begun = counter(self.totals.step, self.cadence.total_steps)
            self.progress.activity(f"{begun}  the first step compiles and touches everything ...")
        with Interrupts() as interrupts:
            self.interrupts = interrupts
            try:
                while self.totals.step < self.cadence.total_steps:
                    if not self._steps(interrupts):
                        assert self.retreat is not None
                        self.retreat("step", self.steps_taken)
                return self._finish(self.sampler.epochs_done(self.cursor))
            except (SpoiltStep, TooManySkips) as error:
                self.checkpoints.report(wait=True)
                raise LayerFerryError(f"{error}. {behind_a_spoilt_step(self.output, self.totals.step)}") from error
            except HalfTakenStep as error:
                self.checkpoints.report(wait=True)
                raise LayerFerryError(f"{error}; {how_to_go_on(self.output)}") from error
            finally:
                self.checkpoints.report(wait=True)  # also where the run ends in an error: the state before it is not lost

    def _steps(self, interrupts: Interrupts) -> bool:
        """Take the steps that are left, as long as the plan's micro-batches are these; False: a step has run out of device
        memory."""
        rows = self.engine.plan.micro_batch_rows
        source = step_batches(self.data.train, self.sampler, self.cursor, rows, self.data.pad_id)
        with self._prefetched(source) as batches:
            while self.totals.step < self.cadence.total_steps and rows == self.engine.plan.micro_batch_rows:
                if not self._one(batches):
                    return False
                if interrupts.received is not None and self.totals.step < self.cadence.total_steps:
                    raise interrupts.error(self._leave())
        return True

    @contextmanager
    def _prefetched(self, source: Iterator[StepBatch]) -> Iterator[Prefetch[StepBatch]]:
        """Its thread may stand still while nobody waits for a batch, and then it is the end of the run that waits for it."""
        batches = Prefetch(source)
        try:
            yield batches
        finally:
            with self.waiting("data loader"):
                batches.close()

    def _one(self, batches: Prefetch[StepBatch]) -> bool:
        """One step, and what is due behind it; False: it has run out of device memory."""
        begin = time.monotonic()
        with self.waiting("data loader"):
            batch = next(batches)
        lr = self.schedule.lr_at(self.totals.step + 1)
        try:
            with self.waiting("device"), self.recorder.recording(self.totals.step + 1), named_rows(batch):
                report = self.engine.step(batch.micro_batches, lr=lr)
                if report.skipped and report.num_targets and self.config.train.detect_anomaly:
                    check_norms(self.engine, report.loss)
        except torch.OutOfMemoryError:
            if self.retreat is None:
                raise
            return False  # the handler is left before anything is allocated: its traceback holds the old buffers
        self.checkpoints.report(wait=False)
        self.cursor, self.history.epoch = batch.cursor, batch.epoch
        ends_epoch = batch.cursor.position == 0
        if report.skipped:  # neither step number nor schedule advances
            self._skips.skipped(batch, report)
            due = self.cadence.after_skipped(self.totals.step, ends_epoch=ends_epoch)
        else:
            self._count(batch, report, begin)
            due = self.cadence.after(self.totals.step, ends_epoch=ends_epoch)
            self._show(batch, report, lr, logs=due.log)
        try:
            if due.evaluate:
                self.evaluate(batch.epoch)
        except PlanError:
            self._save(due)  # what has been trained is not lost for want of room to measure it
            raise
        self._save(due)
        return True

    def _save(self, due: Due) -> None:
        if due.save:
            self.progress.activity(f"saving checkpoint-{self.totals.step}")
            self.checkpoints.save(self.totals.step, self.state(), self.history)

    def _count(self, batch: StepBatch, report: StepReport, begin: float) -> None:
        """A step that has updated something."""
        self._skips.passed()
        self._spikes.look(batch, report, self.totals.step + 1)
        totals = self.totals
        totals.step += 1
        self.checkpoints.prove(totals.step)
        self.history.step_done(totals.step)
        totals.samples += len(batch.sample_ids)
        totals.loss += report.loss
        totals.window_loss += report.loss
        totals.window_steps += 1
        flops = model_flops(batch.micro_batches, self.flops_per_token)
        self.history.tokens_seen += report.num_tokens
        self.history.total_flops += flops
        if self.disk is not None:
            self.disk.step_done()
        self.meter.add(Work(report.num_tokens, flops, time.monotonic() - begin))

    def _show(self, batch: StepBatch, report: StepReport, lr: float, *, logs: bool) -> None:
        view = self._view(report, lr, batch.epoch)
        self.progress.step(view, logs=logs)
        if logs:
            self.totals.window_loss, self.totals.window_steps = 0.0, 0
            self._record({"loss": view.mean_loss, "grad_norm": view.grad_norm, "learning_rate": lr}, batch.epoch)

    def state(self) -> RunState:
        """All that another process needs, besides the engine's planes, to take the next step as this one would."""
        return RunState(
            cursor=self.cursor,
            totals=replace(self.totals),
            tokens_seen=self.history.tokens_seen,
            total_flops=self.history.total_flops,
            schedule=self.schedule.state_dict(),
            entries=list(self.history.entries),
            log_lines=list(self.history.log_lines),
            last_eval=self.last_eval,
            eval_facts=eval_facts(self.config, self.data.eval),
            skipped_batches=list(self._skips.batches),
            data=data_facts(self.sampler, self.data.train),
            settings=settings_of(self.config, self.cadence.total_steps),
            rounding=rounding_of(self.engine.plan, self.engine.store.units),
        )

    def lanes(self) -> list[Lane]:
        """What must move, in the order of who waits for whom."""
        engine, saves = self.engine, self.checkpoints
        return [
            *([] if self.disk is None else [self.disk.lane()]),
            Lane("checkpoint writer", lambda: saves.is_busy, lambda: saves.bytes_written, "Is the disk of output_dir alive?"),
            Lane(
                "data loader",
                lambda: self.waits_for == "data loader",
                lambda: self.totals.step + self.totals.skipped,
                "Is the disk of the data alive?",
            ),
            Lane(
                "optimizer",
                lambda: engine.deferred.num_pending > 0,
                lambda: engine.deferred.num_done,
                "This is a fault of ours: please report it with the stacks above.",
            ),
            Lane(
                "device",
                lambda: self.waits_for == "device",
                lambda: engine.num_steps + engine.moved_bytes + self._num_evaluated,
                "Does the driver's log (dmesg) speak of the device?",
            ),
            Lane(
                "model writer",
                lambda: self.waits_for == "model writer",
                lambda: engine.folder.tensors_read,
                "Is the disk of output_dir alive?",
            ),
        ]

    @contextmanager
    def waiting(self, lane: str) -> Iterator[None]:
        self.waits_for = lane
        try:
            yield
        finally:
            self.waits_for = None

    def _leave(self) -> str:
        """Save where a signal has come, and say how to go on."""
        step = self.totals.step
        self.checkpoints.save(step, self.state(), self.history)
        self.checkpoints.report(wait=True)
        name, remedy = self.checkpoints.name(step), how_to_go_on(self.output)
        if not self.checkpoints.is_whole(step):
            return f"stopped after step {step}, and {name} could not be saved: {remedy}"
        if self.config.train.save_only_model:
            return f"stopped after step {step}; {name} holds the model only (save_only_model): {remedy}"
        return f"stopped after step {step}; {name} is saved: the same command goes on from there {WITHOUT}"

    def _view(self, report: StepReport, lr: float, epoch: float) -> View:
        pace_s = self.meter.seconds_per_step
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
            eta_s=None if pace_s is None else pace_s * (self.cadence.total_steps - self.totals.step),
        )

    def evaluate(self, epoch: float) -> dict[str, float]:
        """Measure the loss on the evaluation sets and record it; a second call at one step measures nothing."""
        if self.last_eval is None or self.last_eval[0] != self.totals.step:
            while (metrics := self._measured()) is None:
                assert self.retreat is not None
                self.retreat("evaluation", self._num_evaluations)
            self._num_evaluations += 1
            self._record(metrics, epoch)
            losses = ", ".join(f"{key} {value:.4f}" for key, value in metrics.items() if key.endswith("loss"))
            logger.info("step %d/%d: %s", self.totals.step, self.cadence.total_steps, losses)
            self.last_eval = (self.totals.step, metrics)
            self.schedule.observe(next(value for key, value in metrics.items() if key.endswith("loss")))
        return {**self.last_eval[1], "epoch": epoch}

    def _measured(self) -> dict[str, float] | None:
        """None: the evaluation has run out of device memory."""
        rows = min(self.config.train.per_device_eval_batch_size, self.engine.plan.micro_batch_rows)
        try:
            with self.waiting("device"):
                return evaluate(self.engine, self.data.eval, rows=rows, pad_id=self.data.pad_id, show=self._show_evaluation)
        except torch.OutOfMemoryError:
            if self.retreat is None:
                raise
            return None  # as above, behind the handler

    def _show_evaluation(self, text: str) -> None:
        self._num_evaluated += 1
        self.progress.activity(text)

    def _finish(self, epoch: float) -> dict[str, float]:
        self.engine.settle()
        seconds = max(self.history.elapsed_s, 1e-9)
        steps = max(self.totals.step, 1)
        metrics = {
            "total_flos": self.history.total_flops,
            "train_loss": self.totals.loss / steps,
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(self.totals.samples / seconds, 3),
            "train_steps_per_second": round(self.steps_taken / seconds, 3),
        }
        if self.totals.skipped:
            metrics["skipped_steps"] = self.totals.skipped
        entry = self._record(metrics, epoch)
        return {key: value for key, value in entry.items() if key != "step"}

    def _record(self, metrics: dict[str, float], epoch: float) -> Entry:
        entry = self.history.add(metrics, step=self.totals.step, epoch=epoch)
        for reporter in self.reporters:
            reporter.report(entry)
        return entry
