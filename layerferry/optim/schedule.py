"""Learning rate by step: Hugging Face's schedules under their names, as LLaMA-Factory configures them.

A schedule is a function of the step alone, so a resumed run needs no schedule state; only ``reduce_lr_on_plateau`` listens to
an evaluation metric and has some. Steps count from 1, as in ``StepHyper``: with a warm-up of a step or more, the first step runs
at 0 (``cosine_warmup_with_min_lr`` begins above). Options come from ``lr_scheduler_kwargs``; one that a schedule does not know is
an error. ``warmup_stable_decay`` splits the steps after warm-up as LLaMA-Factory does: a third stable, the rest decay.
Leaves out ``greedy``. Checked by ``tests/optim/test_schedule.py``: equal floats to ``transformers.get_scheduler``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError

OptionValue = float | int | str
Factor = Callable[[int], float]
"""Steps done → factor on the learning rate."""


class Schedule(Protocol):
    """The learning rate of each step."""

    def lr_at(self, step: int) -> float:
        """Learning rate of step number ``step``, counted from 1."""

    def observe(self, metric: float) -> None:
        """An evaluation has ended with this loss (or other metric)."""

    def state_dict(self) -> dict[str, float | int]:
        """What a checkpoint must keep; empty where the rate depends on the step alone."""

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Take up where ``state_dict`` was called."""


def schedule_of(config: OptimConfig, total_steps: int) -> Schedule:
    """The schedule that ``config`` names, over ``total_steps`` optimizer steps."""
    name = config.lr_scheduler_type
    lr = config.learning_rate
    if name not in SCHEDULES:
        raise ConfigError(f"lr_scheduler_type: {name!r} is unknown{_did_you_mean(name, SCHEDULES)}")
    if not 0.0 <= lr < math.inf:
        raise ConfigError(f"learning_rate: {lr} must be a number from 0 up")
    run = _Run(lr=lr, warmup_steps=warmup_steps(config, total_steps), total_steps=total_steps)
    try:
        if name == "reduce_lr_on_plateau":
            return ReduceOnPlateau(lr, **_options(name, ReduceOnPlateau, config.lr_scheduler_kwargs))
        return StepSchedule(lr, _FACTORS[name](run, **_options(name, _FACTORS[name], config.lr_scheduler_kwargs)))
    except ValueError as error:
        raise ConfigError(f"lr_scheduler_kwargs of {name}: {error}") from error


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """``warmup_steps`` from 1 up counts steps, below it is a share of all steps, rounded up; 0: ``warmup_ratio`` is it."""
    if config.warmup_steps < 0:
        raise ConfigError(f"warmup_steps: {config.warmup_steps} is negative")
    if not 0.0 <= config.warmup_ratio <= 1.0:
        raise ConfigError(f"warmup_ratio: {config.warmup_ratio} is outside [0, 1]")
    if config.warmup_steps >= 1:
        return int(config.warmup_steps)
    return math.ceil(total_steps * (config.warmup_steps or config.warmup_ratio))


class StepSchedule:
    """A ``Schedule`` that depends on the step alone."""

    def __init__(self, lr: float, factor: Factor) -> None:
        self.lr = lr
        self._factor = factor

    def lr_at(self, step: int) -> float:
        assert step >= 1, "steps are counted from 1"
        return self.lr * self._factor(step - 1)

    def observe(self, metric: float) -> None:
        """Nothing to learn from it."""

    def state_dict(self) -> dict[str, float | int]:
        return {}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Nothing was kept."""


class ReduceOnPlateau:
    """``torch.optim.lr_scheduler.ReduceLROnPlateau``: the rate falls when the metric has stopped improving; no warm-up."""

    def __init__(
        self,
        lr: float,
        *,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if factor >= 1.0:
            raise ValueError(f"factor {factor} would not lower the rate: it must be below 1")
        _one_of("mode", mode, ("min", "max"))
        _one_of("threshold_mode", threshold_mode, ("rel", "abs"))
        self._lr = lr
        self._factor, self._min_lr, self._eps = factor, min_lr, eps
        self._patience, self._cooldown = patience, cooldown
        self._sign = 1.0 if mode == "min" else -1.0
        self._threshold, self._relative = threshold, threshold_mode == "rel"
        self._best = self._sign * math.inf
        self._bad = self._cooling = 0

    def lr_at(self, step: int) -> float:
        return self._lr

    def observe(self, metric: float) -> None:
        if self._is_better(metric):
            self._best, self._bad = metric, 0
        else:
            self._bad += 1
        if self._cooling > 0:
            self._cooling, self._bad = self._cooling - 1, 0
        if self._bad > self._patience:
            lower = max(self._lr * self._factor, self._min_lr)
            if self._lr - lower > self._eps:
                self._lr = lower
            self._cooling, self._bad = self._cooldown, 0

    def state_dict(self) -> dict[str, float | int]:
        return {"lr": self._lr, "best": self._best, "bad": self._bad, "cooling": self._cooling}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        self._lr, self._best = float(state["lr"]), float(state["best"])
        self._bad, self._cooling = int(state["bad"]), int(state["cooling"])

    def _is_better(self, metric: float) -> bool:
        margin = self._sign * self._threshold
        bar = self._best * (1.0 - margin) if self._relative else self._best - margin
        return metric < bar if self._sign > 0 else metric > bar


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    lr: float
    warmup_steps: int
    total_steps: int

    def progress(self, done: int) -> float:
        """Share of the steps after warm-up that are done."""
        return (done - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)

    def warmed(self, factor: Factor) -> Factor:
        """``factor`` after a linear warm-up from 0."""
        return lambda done: done / max(1, self.warmup_steps) if done < self.warmup_steps else factor(done)


def _constant(run: _Run) -> Factor:
    return lambda done: 1.0


def _constant_with_warmup(run: _Run) -> Factor:
    return run.warmed(lambda done: 1.0)


def _linear(run: _Run) -> Factor:
    steps_left = max(1, run.total_steps - run.warmup_steps)
    return run.warmed(lambda done: max(0.0, (run.total_steps - done) / steps_left))


def _cosine(run: _Run, *, num_cycles: float = 0.5) -> Factor:
    return run.warmed(lambda done: max(0.0, _cosine_wave(num_cycles, run.progress(done))))


def _cosine_with_restarts(run: _Run, *, num_cycles: int = 1) -> Factor:
    def factor(done: int) -> float:
        progress = run.progress(done)
        if progress >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0))))

    return run.warmed(factor)


def _cosine_with_min_lr(
    run: _Run, *, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> Factor:
    floor = _floor(run, min_lr, min_lr_rate)
    return run.warmed(lambda done: max(0.0, _above(floor, _cosine_wave(num_cycles, run.progress(done)))))


def _cosine_warmup_with_min_lr(
    run: _Run,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Factor:
    """Warm-up and decay are one step ahead of the others', and the warm-up may begin at ``warmup_lr_rate``."""
    floor = _floor(run, min_lr, min_lr_rate)

    def factor(done: int) -> float:
        if done < run.warmup_steps:
            if warmup_lr_rate is None:
                return (done + 1) / max(1, run.warmup_steps)
            return warmup_lr_rate + (1.0 - warmup_lr_rate) * done / max(1, run.warmup_steps - 1)
        return max(0.0, _above(floor, _cosine_wave(num_cycles, run.progress(done + 1))))

    return factor


def _polynomial(run: _Run, *, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    if run.lr <= lr_end:
        raise ValueError(f"lr_end {lr_end} must be below learning_rate {run.lr}")
    decay_steps = max(1, run.total_steps - run.warmup_steps)

    def factor(done: int) -> float:
        if done > run.total_steps:
            return lr_end / run.lr
        remaining = 1 - (done - run.warmup_steps) / decay_steps
        return float(((run.lr - lr_end) * remaining**power + lr_end) / run.lr)

    return run.warmed(factor)


def _inverse_sqrt(run: _Run, *, timescale: int | None = None) -> Factor:
    scale = timescale if timescale is not None else run.warmup_steps or 10_000
    if scale <= 0:
        raise ValueError(f"timescale {scale} must be positive")
    return run.warmed(lambda done: 1.0 / math.sqrt((done + scale - run.warmup_steps) / scale))


_WARMUP_SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (1.0 - math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(1.0 - progress),
}
_DECAY_SHAPES: Mapping[str, Callable[[float, float], float]] = {
    "linear": lambda progress, num_cycles: 1.0 - progress,
    "cosine": lambda progress, num_cycles: _cosine_wave(num_cycles, progress),
    "1-sqrt": lambda progress, num_cycles: 1.0 - math.sqrt(progress),
}


def _warmup_stable_decay(
    run: _Run,
    *,
    num_stable_steps: int | None = None,
    num_decay_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    _one_of("warmup_type", warmup_type, tuple(_WARMUP_SHAPES))
    _one_of("decay_type", decay_type, tuple(_DECAY_SHAPES))
    after_warmup = run.total_steps - run.warmup_steps
    stable = after_warmup // 3 if num_stable_steps is None else num_stable_steps
    decay = after_warmup - after_warmup // 3 if num_decay_steps is None else num_decay_steps

    def factor(done: int) -> float:
        if done < run.warmup_steps:
            return max(0.0, _above(min_lr_ratio, _WARMUP_SHAPES[warmup_type](done / run.warmup_steps)))
        decayed = done - run.warmup_steps - stable
        if decayed < 0:
            return 1.0
        if decayed < decay:
            return max(0.0, _above(min_lr_ratio, _DECAY_SHAPES[decay_type](decayed / decay, num_cycles)))
        return min_lr_ratio

    return factor


def _cosine_wave(num_cycles: float, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


def _above(floor: float, factor: float) -> float:
    return factor * (1.0 - floor) + floor


def _floor(run: _Run, min_lr: float | None, min_lr_rate: float | None) -> float:
    if min_lr is not None and min_lr_rate is None:
        if run.lr == 0.0:
            raise ValueError("min_lr is a share of learning_rate, which is 0: give min_lr_rate")
        return min_lr / run.lr
    if min_lr_rate is not None and min_lr is None:
        return min_lr_rate
    raise ValueError("give min_lr or min_lr_rate, and one of them only")


_FACTORS: Mapping[str, Callable[..., Factor]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}

SCHEDULES = (*_FACTORS, "reduce_lr_on_plateau")
"""Names that ``lr_scheduler_type`` may have."""


def _options(name: str, build: Callable[..., object], given: Mapping[str, OptionValue]) -> dict[str, Any]:
    """``given``, each a keyword of ``build`` and of its kind: text where the annotation says so, whole where it says int."""
    known = {
        key: str(parameter.annotation)
        for key, parameter in inspect.signature(build).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    options: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"lr_scheduler_kwargs: {name} has no {key!r}{_did_you_mean(key, tuple(known))}")
        options[key] = _value(key, value, known[key])
    return options


def _value(key: str, value: OptionValue, annotation: str) -> OptionValue:
    if "str" in annotation:
        return str(value)
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"lr_scheduler_kwargs: {key} must be a number, not {value!r}") from None
    if "int" not in annotation:
        return number
    if not number.is_integer():
        raise ConfigError(f"lr_scheduler_kwargs: {key} must be a whole number, not {value!r}")
    return int(number)


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key} {value!r} is none of {', '.join(choices)}")


def _did_you_mean(name: str, choices: tuple[str, ...]) -> str:
    close = get_close_matches(name, choices, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(choices)}" if choices else ""
