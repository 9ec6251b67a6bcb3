"""After which steps a run logs, evaluates and saves: Hugging Face's rules, in one place.

An interval below 1 is a share of all steps, rounded up. A run that evaluates or saves by steps also does so after its
last step. Leaves out: early stopping, best-model tracking. Checked by ``tests/trainer/test_cadence.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerferry.config import TrainConfig
from layerferry.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What has to be done after a step."""

    log: bool
    evaluate: bool
    save: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The intervals of one run, in steps; 0: never by steps."""

    total_steps: int
    logging_steps: int
    eval_steps: int
    save_steps: int
    logs_first: bool
    evaluates_by_steps: bool
    saves_by_steps: bool
    evaluates_by_epochs: bool
    saves_by_epochs: bool

    @classmethod
    def of(cls, config: TrainConfig, total_steps: int, *, has_eval_rows: bool) -> Cadence:
        """The intervals that the configuration asks for."""
        logging_steps = interval("logging_steps", config.logging_steps, total_steps)
        if logging_steps == 0:
            raise ConfigError("logging_steps: 0 never logs; give a number of steps, or a share of all steps below 1")
        if config.eval_strategy != "no" and not has_eval_rows:
            raise ConfigError(f"eval_strategy: {config.eval_strategy} needs rows to evaluate on: set val_size or eval_dataset")
        eval_steps = config.logging_steps if config.eval_steps is None else config.eval_steps
        return cls(
            total_steps=total_steps,
            logging_steps=logging_steps,
            eval_steps=interval("eval_steps", eval_steps, total_steps),
            save_steps=interval("save_steps", config.save_steps, total_steps),
            logs_first=config.logging_first_step,
            evaluates_by_steps=config.eval_strategy == "steps",
            saves_by_steps=config.save_strategy == "steps",
            evaluates_by_epochs=config.eval_strategy == "epoch",
            saves_by_epochs=config.save_strategy == "epoch",
        )

    def after(self, step: int, *, ends_epoch: bool) -> Due:
        """What is due after ``step`` (the first one is 1)."""
        last = step >= self.total_steps
        return Due(
            log=_hits(step, self.logging_steps) or (self.logs_first and step == 1),
            evaluate=(self.evaluates_by_steps and (last or _hits(step, self.eval_steps)))
            or (self.evaluates_by_epochs and (ends_epoch or last)),
            save=(self.saves_by_steps and (last or _hits(step, self.save_steps)))
            or (self.saves_by_epochs and (ends_epoch or last)),
        )

    def after_skipped(self, step: int, *, ends_epoch: bool) -> Due:
        """What is due where a step after ``step`` was skipped: it may have been the last of an epoch all the same."""
        return Due(
            log=False,
            evaluate=self.evaluates_by_epochs and ends_epoch,
            save=self.saves_by_epochs and ends_epoch and step > 0,
        )


def interval(key: str, value: float, total_steps: int) -> int:
    """A number of steps: ``value`` itself, or below 1 that share of all steps."""
    if value < 0:
        raise ConfigError(f"{key}: {value} is negative")
    if value >= 1:
        if value != int(value):
            raise ConfigError(f"{key}: {value} is neither a whole number of steps nor a share below 1")
        return int(value)
    return math.ceil(total_steps * value)


def _hits(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
