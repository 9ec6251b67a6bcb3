"""What a run has measured so far, in memory and in LLaMA-Factory's files.

``trainer_log.jsonl`` gets a line whenever something is logged, so that it can be followed while the run goes on;
``trainer_state.json`` (Hugging Face's ``TrainerState``) and the ``*_results.json`` are written whole. Numbers are not
rounded, except where LLaMA-Factory rounds too. A number that is not finite is written as ``null``: NaN is no JSON.
Leaves out: curves (``plots``), trackers (``reporters``). Checked by ``tests/trainer/test_history.py``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from layerferry.config import TrainConfig
from layerferry.trainer.cadence import Cadence

LOG_NAME = "trainer_log.jsonl"
STATE_NAME = "trainer_state.json"

Entry = dict[str, float]
"""One entry of the history: metric name to value, with ``step`` and ``epoch``."""


class History:
    """The record of one run. Written by the training loop only."""

    def __init__(self, config: TrainConfig, cadence: Cadence, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._cadence = cadence
        self._folder = Path(config.output_dir)
        self._clock = clock
        self._start_s = clock()
        self.entries: list[Entry] = []
        self.tokens_seen = 0
        self.total_flops = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._start_s

    def restart_clock(self) -> None:
        """Start counting now: loading is not training."""
        self._start_s = self._clock()

    def add(self, metrics: Mapping[str, float], *, step: int, epoch: float) -> Entry:
        """Append an entry to the history and a line to trainer_log.jsonl."""
        entry: Entry = {**metrics, "epoch": epoch, "step": step}
        if self._config.include_num_input_tokens_seen:
            entry["num_input_tokens_seen"] = self.tokens_seen
        self.entries.append(entry)
        with open(self._folder / LOG_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(self._log_line(entry))) + "\n")
        return entry

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
        line["remaining_time"] = clock_time(elapsed_s / step * (total - step) if step else 0)
        if self._config.include_num_input_tokens_seen:
            line["throughput"] = round(self.tokens_seen / max(elapsed_s, 1e-9), 2)
            line["total_tokens"] = self.tokens_seen
        return line

    def write_state(self, folder: Path) -> None:
        """Write trainer_state.json into the output folder or a checkpoint."""
        last: Entry = self.entries[-1] if self.entries else {"epoch": 0.0, "step": 0}
        state: dict[str, Any] = {
            "best_global_step": None,
            "best_metric": None,
            "best_model_checkpoint": None,
            "epoch": last["epoch"],
            "eval_steps": self._cadence.eval_steps,
            "global_step": last["step"],
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
        write_json(folder / STATE_NAME, state)

    def write_results(self, split: str, metrics: Mapping[str, float]) -> None:
        """Write ``<split>_results.json`` and merge it into all_results.json."""
        write_json(self._folder / f"{split}_results.json", metrics, sort_keys=True)
        merged_path = self._folder / "all_results.json"
        merged = json.loads(merged_path.read_text(encoding="utf-8")) if merged_path.exists() else {}
        write_json(merged_path, {**merged, **metrics}, sort_keys=True)


def clock_time(seconds: float) -> str:
    """``1:02:03``, as LLaMA-Factory writes it."""
    return str(timedelta(seconds=int(seconds)))


def write_json(path: Path, value: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    """Write a JSON file that is either the old one or the new one, whole."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(_finite(value), indent=2, sort_keys=sort_keys) + "\n", encoding="utf-8")
    partial.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
