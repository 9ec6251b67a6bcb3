"""What is advised is what a search with those settings finds, and nothing is said where nothing is waited for."""

from __future__ import annotations

from dataclasses import replace

from layerferry.config import OptimConfig
from layerferry.optim.choose import optimizer_for
from layerferry.planner.advice import BETTER, faster, tokens_per_s
from layerferry.planner.choose import decide
from layerferry.planner.problem import Problem, problem
from layerferry.planner.rate import Rate
from layerferry.planner.report import PlanReport
from layerferry.planner.updates import with_update_rate
from layerferry.store.store import plane_specs
from tests.planner.subjects import config, machine, qwen, specs

FEW = {"chunk_tokens": 4096, "num_slots": 3, "num_slabs": 2}
SLOW = {"optimizer_s_per_param": Rate(0.6e-9, "slow"), "coded_optimizer_s_per_param": Rate(0.3e-9, "slow")}


def ask(rows: int, **there: object) -> Problem:
    return problem(qwen("qwen2.5-7b"), specs(), machine(device_gib=23, host_gib=120, **there), config(rows=rows, **FEW), 1024)


def test_every_advice_is_what_those_settings_bring_and_the_best_is_first() -> None:
    question = ask(16, **SLOW)
    now = decide(question).plan
    found = {one.settings: one.tokens_per_s for one in faster(question, now)}
    assert list(found.values()) == sorted(found.values(), reverse=True) and min(found.values()) > BETTER * tokens_per_s(now)
    lean = plane_specs(optimizer_for(OptimConfig(optim="adamw_8bit")).state_planes)
    instead = {
        "optim: adamw_8bit": replace(question, specs=lean, machine=with_update_rate(question.machine, lean)),
        "update_on_arrival: true, max_grad_norm: 0": replace(question, on_arrival=True),
        "gradient_accumulation_steps: 4": ask(64, **SLOW),
    }
    assert found == {settings: tokens_per_s(decide(other).plan) for settings, other in instead.items()}


def test_nothing_is_said_where_updates_are_hardly_waited_for() -> None:
    question = ask(128)
    assert faster(question, decide(question).plan) == ()


def test_what_contradicts_the_pins_or_is_set_already_is_not_advised() -> None:
    question = ask(16, **SLOW)
    pinned = replace(question, pins=replace(question.pins, carry_fp32=True))
    lean = plane_specs(optimizer_for(OptimConfig(optim="adamw_8bit")).state_planes)
    leaner = replace(pinned, specs=lean, machine=with_update_rate(question.machine, lean))
    settings = [one.settings.split(":")[0] for one in faster(leaner, decide(leaner).plan)]
    assert settings == ["gradient_accumulation_steps"]


def test_the_report_shows_it() -> None:
    decision = decide(ask(16, **SLOW))
    shown = PlanReport(decision=decision, faster=faster(decision.question, decision.plan))
    text = shown.render().split("it would be faster with")[1]
    assert "optim: adamw_8bit " in text and "nothing is clipped" in text and max(map(len, text.splitlines())) <= 100
    assert {one["settings"] for one in shown.to_dict()["faster"]} >= {"optim: adamw_8bit"}
    assert "faster with" not in PlanReport(decision=decision).render()
