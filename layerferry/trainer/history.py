"""What a run has measured so far, in memory and in LLaMA-Factory's files.

``trainer_log.jsonl`` gets a line whenever something is logged, so that it can be followed while the run goes on;
``trainer_state.json`` (Hugging Face's ``TrainerState``) and the ``*_results.json`` are written whole. Numbers are not
rounded, except where LLaMA-Factory rounds too. A number that is not finite is written as ``null``: NaN is no JSON.
Leaves out: how files get there (``output``), curves (``plots``), trackers (``reporters``).
Checked by ``tests/trainer/test_history.py``.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from layerferry.checkpoint.files import read_small
from layerferry.config import TrainConfig
from layerferry.trainer.cadence import Cadence
from layerferry.trainer.output import OutputFolder, json_line, json_text

logger = logging.getLogger("layerferry.trainer")

LOG_NAME = "trainer_log.jsonl"
STATE_NAME = "trainer_state.json"
ALL_RESULTS = "all_results.json"
MAX_RESULTS_BYTES = 1 << 24

Entry = dict[str, float]
"""One entry of the history: metric name to value, with ``step`` and ``epoch``."""


class History:
    """The record of one run. Written by the training loop only."""

    def __init__(
        self,
        config: TrainConfig,
        cadence: Cadence,
        output: OutputFolder,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._cadence = cadence
        self._output, self._clock = output, clock
        self._start_s = clock()
        self._first_done: tuple[int, float] | None = None
        """Number of this process's first step, and when it was done."""
        self.entries: list[Entry] = []
        self.log_lines: list[str] = []
        """The lines of trainer_log.jsonl."""
        self._log_is_written = True
        self.step, self.epoch = 0, 0.0
        """Where the run stands, whatever was logged last; the loop says so."""
        self.tokens_seen = 0
        self.total_flops = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._start_s

    def restart_clock(self) -> None:
        """Start counting now: loading is not training."""
        self._start_s, self._first_done = self._clock(), None

    def step_done(self, step: int) -> None:
        """Called after every step: the time that is left is told from those behind the first, which compiles."""
        self.step = step
        if self._first_done is None:
            self._first_done = step, self._clock()

    def add(self, metrics: Mapping[str, float], *, step: int, epoch: float) -> Entry:
        """Append an entry to the history and a line to trainer_log.jsonl."""
        entry: Entry = {**metrics, "epoch": epoch, "step": step}
        if self._config.include_num_input_tokens_seen:
            entry["num_input_tokens_seen"] = self.tokens_seen
        self.entries.append(entry)
        self.log_lines.append(json_line(self._log_line(entry)))
        self._write_log(self.log_lines[-1:])
        return entry

    def take_up(self, entries: list[Entry], log_lines: list[str], *, tokens_seen: int, total_flops: float) -> None:
        """Go on from the record of a checkpoint: what a log had beyond it is forgotten."""
        self.entries, self.log_lines = list(entries), list(log_lines)
        self.tokens_seen, self.total_flops = tokens_seen, total_flops
        self._write_log()

    def _write_log(self, more: list[str] | None = None) -> None:
        """Add ``more``; None: write every line anew. A disk that takes no lines costs the file, not the run; the next line that
        can be written brings the lost ones."""
        try:
            if more is None or not self._log_is_written:
                self._output.write(LOG_NAME, "".join(self.log_lines).encode("utf-8"))
            else:
                self._output.append(LOG_NAME, "".join(more))
            self._log_is_written = True
        except OSError as error:
            if self._log_is_written:
                logger.error("%s cannot be written: %s; training goes on", self._output.path / LOG_NAME, error.strerror or error)
            self._log_is_written = False

    def _log_line(self, entry: Entry) -> dict[str, Any]:
        step, total = int(entry["step"]), self._cadence.total_steps
        elapsed_s = self.elapsed_s
        line: dict[str, Any] = {"current_steps": step, "total_steps": total}
        line |= {key: entry[key] for key in entry if key == "loss" or (key.startswith("eval_") and key.endswith("loss"))}
        if "learning_rate" in entry:
            line["lr"] = entry["learning_rate"]
        line["epoch"] = entry["epoch"]
        line["percentage"] = round(step / total * 100, 2) if total else 100
        line["elapsed_time"] = clock_time(elapsed_s)
        line["remaining_time"] = self._remaining_time(total - step, step)
        if self._config.include_num_input_tokens_seen:
            line["throughput"] = round(self.tokens_seen / max(elapsed_s, 1e-9), 2)
            line["total_tokens"] = self.tokens_seen
        return line

    def _remaining_time(self, steps_left: int, step: int) -> str:
        """Empty while it is not known."""
        if steps_left <= 0:
            return clock_time(0)
        if self._first_done is None or step <= self._first_done[0]:
            return ""
        first, done_s = self._first_done
        return clock_time((self._clock() - done_s) / (step - first) * steps_left)

    def write_state(self) -> None:
        """Write trainer_state.json into the output folder."""
        self._output.write_json(STATE_NAME, self._state())

    def state_bytes(self) -> bytes:
        """The content of trainer_state.json, for a checkpoint."""
        return json_text(self._state()).encode("utf-8")

    def _state(self) -> dict[str, Any]:
        return {
            "best_global_step": None,
            "best_metric": None,
            "best_model_checkpoint": None,
            "epoch": self.epoch,
            "eval_steps": self._cadence.eval_steps,
            "global_step": self.step,
            "is_hyper_param_search": False,
            "is_local_process_zero": True,
            "is_world_process_zero": True,
            "log_history": self.entries,
            "logging_steps": self._cadence.logging_steps,
            "max_steps": self._cadence.total_steps,
            "num_input_tokens_seen": self.tokens_seen,
            "num_train_epochs": math.ceil(self._config.num_train_epochs),
            "save_steps": self._cadence.save_steps,
            "stateful_callbacks": {},
            "total_flos": self.total_flops,
            "train_batch_size": self._config.per_device_train_batch_size,
            "trial_name": None,
            "trial_params": None,
        }

    def write_results(self, split: str, metrics: Mapping[str, float]) -> None:
        """Write ``<split>_results.json`` and merge it into all_results.json."""
        self._output.write_json(f"{split}_results.json", metrics, sort_keys=True)
        self._output.write_json(ALL_RESULTS, {**self._earlier_results(), **metrics}, sort_keys=True)

    def _earlier_results(self) -> dict[str, Any]:
        """What all_results.json holds; nothing where it cannot be read."""
        try:
            found = json.loads(read_small(self._output.path / ALL_RESULTS, MAX_RESULTS_BYTES).decode("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def clock_time(seconds: float) -> str:
    """``1:02:03``, as LLaMA-Factory writes it."""
    return str(timedelta(seconds=int(seconds)))
