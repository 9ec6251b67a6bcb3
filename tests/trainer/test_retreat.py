"""Out of device memory in the first steps: the step is taken again under a smaller plan; later it is the end."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from layerferry.config import EngineConfig
from layerferry.engine.engine import Engine
from layerferry.engine.sizes import refuse_turning
from layerferry.errors import PlanError
from layerferry.plan import Plan
from layerferry.planner.problem import problem
from layerferry.trainer import train
from layerferry.trainer.retreat import _neighbours, retreat
from tests.planner.subjects import config, machine, qwen, specs
from tests.reliability.runs import ENGINES, make_config, prepare


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("base"))


def fail_at(monkeypatch: pytest.MonkeyPatch, step: int, *, fits: int) -> None:
    """From step ``step`` on the device holds micro-batches of at most ``fits`` rows; it fails behind a whole backward."""
    real = Engine._read

    def read(self: Engine, *arguments: Any) -> tuple[float, float]:
        if self.num_steps >= step and self.plan.micro_batch_rows > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *arguments)

    monkeypatch.setattr(Engine, "_read", read)


def losses(output: Path) -> list[float]:
    state = json.loads((output / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def config_of(base: Path, output: Path) -> Any:
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 4, "logging_steps": 1}
    return make_config(base, output, save_strategy="no", fp32=True, **changes)


@pytest.mark.parametrize("step", [0, 2])
def test_the_step_is_taken_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    """The rows of every step are those of a run that had the room. Sums over rows are taken in another order: fp32 rounding
    of a few thousand terms, 1e-5 relative, carried through two updates."""
    monkeypatch.setitem(ENGINES, "streamed", EngineConfig(device="cpu"))
    monkeypatch.setattr("tests.reliability.runs.ENGINES", ENGINES)
    train(config_of(base, tmp_path / "whole"))
    fail_at(monkeypatch, step, fits=1)
    with caplog.at_level(logging.WARNING, "layerferry"):
        train(config_of(base, tmp_path / "small"))
    assert "the step is taken again under a smaller plan (" in caplog.text and "nothing is lost" in caplog.text
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    assert losses(tmp_path / "small")[:step] == losses(tmp_path / "whole")[:step]


@pytest.mark.parametrize("home", [0, 6, 25, 29])
@pytest.mark.parametrize("turn", [1, 4, 14, 28])
def test_layers_that_turn_have_slots_under_every_smaller_plan(home: int, turn: int) -> None:
    """With layers @device, which turn without a slot: there may be fewer slots than layers that turn."""
    units = qwen("qwen2.5-7b").units
    plan = Plan(micro_batch_rows=2, rows_per_step=4, turn_layers=turn, on_device=tuple(range(home)))
    travelling = sum(unit.is_layer for unit in units[home:])
    plan = replace(plan, num_slots=min(turn + 2, travelling))
    for one in (plan, *_neighbours(plan)):
        refuse_turning(units, one, 0)
        assert one.num_slots <= plan.num_slots


def test_a_limit_that_the_user_has_set_is_no_other_process() -> None:
    question = problem(qwen("qwen2.5-7b"), specs(), machine(), config(), 1024)
    engine = SimpleNamespace(plan=Plan())
    with pytest.raises(PlanError, match=r"device_memory is what the allocator may take.*set it higher"):
        retreat(cast(Engine, engine), question, steps_done=9)


def test_later_it_is_the_end(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, 3, fits=1)
    with pytest.raises(PlanError, match=r"out of device memory after 3 steps.*set device_memory"):
        train(config_of(base, tmp_path / "late"))


def test_nothing_smaller(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, 0, fits=0)
    with pytest.raises(PlanError, match="out of device memory after 0 steps"):
        train(config_of(base, tmp_path / "none"))
