"""Out of device memory in the first steps: the step is taken again under a smaller plan; later it is the end."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from layerferry.config import EngineConfig
from layerferry.engine.arrivals import refuse_carried_arrivals
from layerferry.engine.engine import Engine, EvalReport
from layerferry.engine.kept import KeptInputs
from layerferry.engine.sizes import refuse_turning
from layerferry.errors import LayerFerryError, PlanError
from layerferry.plan import Plan
from layerferry.planner.facts import Model
from layerferry.planner.problem import problem
from layerferry.trainer import train
from layerferry.trainer.retreat import _neighbours, retreat
from tests.planner.subjects import config, machine, qwen, skeleton, specs
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
    for one in (plan, *_neighbours(qwen("qwen2.5-7b"), plan)):
        refuse_turning(units, one, 0)
        assert one.num_slots <= plan.num_slots


def test_no_smaller_plan_is_one_that_the_engine_refuses() -> None:
    """On arrival no gradient can wait for a second wave."""
    plan = Plan(fp32=True, micro_batch_rows=2, rows_per_step=16, on_arrival=True)
    model = qwen("qwen2.5-7b")
    for one in _neighbours(model, plan):
        refuse_carried_arrivals(one)
    assert {one.num_waves for one in _neighbours(model, replace(plan, on_arrival=False))} == {1, 2}


def test_parts_of_experts_are_halved_as_long_as_there_are_several_in_one() -> None:
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = Model.of(skeleton("qwen3_moe", **sizes))
    plans = {parts: Plan(expert_parts=parts, num_slots=2) for parts in (2, 3, 6)}
    found = {parts: {one.expert_parts for one in _neighbours(model, plan)} - {parts} for parts, plan in plans.items()}
    assert found == {2: {3}, 3: {6}, 6: set()}


def test_a_limit_that_the_user_has_set_is_no_other_process() -> None:
    question = problem(qwen("qwen2.5-7b"), specs(), machine(), config(), 1024)
    engine = SimpleNamespace(plan=Plan(), settle=lambda: None)
    with pytest.raises(PlanError, match=r"device_memory is what the allocator may take.*set it higher"):
        retreat(cast(Engine, engine), question, what="step", done=9)


def test_later_it_is_the_end(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, 3, fits=1)
    with pytest.raises(PlanError, match=r"out of device memory after 3 steps.*set device_memory"):
        train(config_of(base, tmp_path / "late"))


def test_nothing_smaller(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, 0, fits=0)
    with pytest.raises(PlanError, match="out of device memory after 0 steps"):
        train(config_of(base, tmp_path / "none"))


def fail_evaluating(monkeypatch: pytest.MonkeyPatch, *, first: int) -> None:
    """From the evaluation of this number on (from 0) the device holds micro-batches of one row."""
    real, calls = Engine.evaluate, itertools.count()

    def evaluate(self: Engine, *arguments: Any) -> EvalReport:
        if next(calls) >= first and self.plan.micro_batch_rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *arguments)

    monkeypatch.setattr(Engine, "evaluate", evaluate)


def evaluated(base: Path, output: Path) -> Any:
    """Evaluates and saves after every second step of four."""
    saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 4}
    return make_config(base, output, fp32=True, max_steps=4, data={"val_size": 4}, **rows, **saves)


def test_an_evaluation_is_made_again(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what is due behind it is done: the same records as of a run that had the room, and the steps that follow."""
    monkeypatch.setitem(ENGINES, "streamed", EngineConfig(device="cpu"))
    train(evaluated(base, tmp_path / "whole"))
    fail_evaluating(monkeypatch, first=0)
    with caplog.at_level(logging.WARNING, "layerferry"):
        train(evaluated(base, tmp_path / "small"))
    assert "out of device memory: the evaluation is made again under a smaller plan (micro_batch_rows 4 -> " in caplog.text
    whole, small = (evaluations(tmp_path / name) for name in ("whole", "small"))
    assert list(small) == list(whole) == [2, 4] and small == pytest.approx(whole, rel=1e-3)
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    assert losses(tmp_path / "small")[:2] == losses(tmp_path / "whole")[:2]
    assert {path.name for path in (tmp_path / "small").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


def evaluations(output: Path) -> dict[int, float]:
    state = json.loads((output / "trainer_state.json").read_text())
    return {entry["step"]: entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry}


def test_an_evaluation_that_finds_no_room_does_not_cost_the_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerferry.trainer.retreat.MOST_DONE", 1)
    fail_evaluating(monkeypatch, first=1)
    with pytest.raises(PlanError, match=r"out of device memory after 1 evaluations"):
        train(evaluated(base, tmp_path / "none"))
    assert {path.name for path in (tmp_path / "none").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


def test_a_step_that_is_half_taken_says_how_to_go_on(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates on arrival have been made when the loss is read: no smaller plan can take the step again."""
    monkeypatch.setitem(ENGINES, "streamed", EngineConfig(device="cpu", update_on_arrival=True))
    fail_at(monkeypatch, 2, fits=0)
    with pytest.raises(
        LayerFerryError,
        match=r"^step 3 broke off when some of its updates had been made \(OutOfMemoryError: CUDA out of memory\): the weights "
        r"in memory are of two steps, .*; the same command goes on from checkpoint-2 ",
    ):
        config = evaluated(base, tmp_path / "half")
        train(replace(config, optim=replace(config.optim, max_grad_norm=0.0)))


@pytest.mark.parametrize("fits", [1, 0])
def test_a_plan_whose_buffers_find_no_room_is_passed_over(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    """The step has room for one row; buffers for two rows do not fit either, or with ``fits`` 0 none do."""
    monkeypatch.setitem(ENGINES, "streamed", EngineConfig(device="cpu"))
    fail_at(monkeypatch, 0, fits=1)
    tried: list[int] = []

    class Full(KeptInputs):
        def __init__(self, *arguments: Any) -> None:
            if tried and tried[-1] > fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(*arguments)

    real = Engine.replan

    def replan(self: Engine, plan: Plan) -> None:
        tried.append(plan.micro_batch_rows)
        real(self, plan)

    monkeypatch.setattr("layerferry.engine.engine.KeptInputs", Full)
    monkeypatch.setattr(Engine, "replan", replan)
    if fits:
        train(config_of(base, tmp_path / "small"))
        assert tried[-2:] == [2, 1] and len(losses(tmp_path / "small")) == 4
    else:
        with pytest.raises(PlanError, match=r"out of device memory after 0 steps with .* planned"):
            train(config_of(base, tmp_path / "none"))
        assert len(tried) > 2
