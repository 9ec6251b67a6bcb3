"""Schedules against ``transformers.get_scheduler`` (and torch's plateau scheduler): equal floats, step by step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError
from layerferry.optim.schedule import SCHEDULES, Schedule, schedule_of, warmup_steps

STEPS = 200
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "linear": [{}],
    "cosine": [{}, {"num_cycles": 1.25}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"lr_end": 1e-6, "power": 2.0}],
    "constant": [{}],
    "constant_with_warmup": [{}],
    "inverse_sqrt": [{}, {"timescale": 50}],
    "cosine_with_min_lr": [{"min_lr": 1e-6}, {"min_lr_rate": 0.1, "num_cycles": 0.75}],
    "cosine_warmup_with_min_lr": [{"min_lr": 1e-6}, {"min_lr_rate": 0.1, "warmup_lr_rate": 0.05}],
    "warmup_stable_decay": [
        {"num_stable_steps": 40, "num_decay_steps": 60},
        {"num_stable_steps": 10, "num_decay_steps": 70, "decay_type": "linear", "warmup_type": "cosine", "min_lr_ratio": 0.1},
        {"num_stable_steps": 0, "num_decay_steps": 30, "decay_type": "1-sqrt", "warmup_type": "1-sqrt", "num_cycles": 1.0},
    ],
}


def config(name: str, options: dict[str, Any] | None = None, **settings: Any) -> OptimConfig:
    return OptimConfig(learning_rate=3e-5, lr_scheduler_type=name, lr_scheduler_kwargs=options or {}, **settings)


def dummy_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)


def rates_of_transformers(name: str, options: dict[str, Any], warmup: int, total: int, steps: int) -> list[float]:
    from transformers import get_scheduler

    optimizer = dummy_optimizer()
    steps_given = None if "num_stable_steps" in options else total  # it warns where it is told both
    scheduler = get_scheduler(name, optimizer, warmup, steps_given, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.lr_at(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 17])
@pytest.mark.parametrize(("name", "options"), [(name, options) for name, several in OPTIONS.items() for options in several])
def test_equal_floats_to_transformers(name: str, options: dict[str, Any], warmup: int) -> None:
    """Also past the end of the planned steps."""
    ours = rates(schedule_of(config(name, options, warmup_steps=warmup), 180), STEPS)
    assert ours == rates_of_transformers(name, options, warmup, 180, STEPS)


def test_every_name_is_compared() -> None:
    assert {*OPTIONS, "reduce_lr_on_plateau"} == set(SCHEDULES)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("constant", "cosine_warmup_with_min_lr")])
def test_warm_up_begins_at_zero_and_ends_at_the_full_rate(name: str) -> None:
    schedule = schedule_of(config(name, OPTIONS[name][0], warmup_steps=4), 100)
    assert schedule.lr_at(1) == 0.0
    assert schedule.lr_at(5) == pytest.approx(3e-5, rel=1e-12)


def test_stable_and_decay_split_as_llamafactory_does() -> None:
    """100 steps, 10 of warm-up: 30 stable (a third of 90, rounded down), 60 of decay."""
    schedule = schedule_of(config("warmup_stable_decay", warmup_ratio=0.1), 100)
    wanted = rates_of_transformers("warmup_stable_decay", {"num_stable_steps": 30, "num_decay_steps": 60}, 10, 100, 110)
    assert rates(schedule, 110) == wanted
    some = schedule_of(config("warmup_stable_decay", {"num_decay_steps": 20}, warmup_steps=10), 101)
    wanted = rates_of_transformers("warmup_stable_decay", {"num_stable_steps": 30, "num_decay_steps": 20}, 10, 101, 110)
    assert rates(some, 110) == wanted


@pytest.mark.parametrize(
    ("settings", "total", "wanted"),
    [
        ({}, 100, 0),
        ({"warmup_ratio": 0.03}, 100, 3),
        ({"warmup_ratio": 0.03}, 101, 4),
        ({"warmup_steps": 0.1}, 55, 6),
        ({"warmup_steps": 20, "warmup_ratio": 0.5}, 100, 20),
        ({"warmup_steps": 1}, 100, 1),
    ],
)
def test_warm_up_length(settings: dict[str, float], total: int, wanted: int) -> None:
    assert warmup_steps(OptimConfig(**settings), total) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"patience": 2}, {"mode": "max", "factor": 0.5, "patience": 1, "cooldown": 2, "min_lr": 1e-6}]
)
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
def test_plateau_equals_torch(options: dict[str, Any], threshold_mode: str) -> None:
    options = options | {"threshold_mode": threshold_mode, "threshold": 0.01, "eps": 1e-12}
    optimizer = dummy_optimizer()
    oracle = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    schedule = schedule_of(config("reduce_lr_on_plateau", options), 100)
    draw = random.Random(0)
    seen = set()
    for step in range(1, 101):
        assert schedule.lr_at(step) == optimizer.param_groups[0]["lr"]
        seen.add(schedule.lr_at(step))
        metric = 2.0 + draw.uniform(-0.1, 0.1) - 0.001 * step
        schedule.observe(metric)
        oracle.step(metric)
        resumed = schedule_of(config("reduce_lr_on_plateau", options), 100)
        resumed.load_state_dict(schedule.state_dict())
        schedule = resumed
    assert len(seen) > 3, "the trial must lower the rate"


def test_plain_schedules_ignore_metrics_and_keep_nothing() -> None:
    schedule = schedule_of(config("cosine"), 10)
    before = rates(schedule, 10)
    schedule.observe(float("nan"))
    assert schedule.state_dict() == {} and rates(schedule, 10) == before


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosin", {}, "lr_scheduler_type.*'cosin'.*did you mean 'cosine'"),
        ("xyz", {}, "known: linear, cosine"),
        ("cosine", {"num_cycle": 1}, "'num_cycle'.*did you mean 'num_cycles'"),
        ("linear", {"power": 1}, "linear has no 'power'"),
        ("cosine_with_min_lr", {}, "min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 1e-6, "min_lr_rate": 0.1}, "one of them only"),
        ("cosine_with_restarts", {"num_cycles": 1.5}, "num_cycles must be a whole number"),
        ("polynomial", {"lr_end": 1.0}, "lr_end 1.0 must be below learning_rate"),
        ("polynomial", {"power": "two"}, "power must be a number, not 'two'"),
        ("inverse_sqrt", {"timescale": 0}, "timescale 0"),
        ("warmup_stable_decay", {"decay_type": "sqrt"}, "decay_type 'sqrt' is none of linear, cosine, 1-sqrt"),
        ("reduce_lr_on_plateau", {"mode": "best"}, "mode 'best' is none of min, max"),
        ("reduce_lr_on_plateau", {"factor": 1.0}, "factor 1.0"),
        ("reduce_lr_on_plateau", {"patiense": 3}, "did you mean 'patience'"),
    ],
)
def test_mistakes_in_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule_of(config(name, options), 100)


@pytest.mark.parametrize(
    "settings", [{"learning_rate": -1e-5}, {"learning_rate": float("nan")}, {"warmup_steps": -1}, {"warmup_ratio": 1.5}]
)
def test_impossible_settings_are_named(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        schedule_of(OptimConfig(**settings), 100)  # type: ignore[arg-type]


def test_a_least_rate_of_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_lr_rate"):
        schedule_of(
            OptimConfig(learning_rate=0.0, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-6}), 10
        )
