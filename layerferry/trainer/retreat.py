"""Out of device memory in the first steps or evaluations: the same run under the next smaller plan.

A plan's activations may be an estimate, other processes come and go, and libraries take workspaces that nobody has counted. A
step that fails for want of device memory has updated nothing (else the engine says so, and the run ends), so the planes, which
are the run, stay where they are; buffers and templates are made anew for a plan that keeps less, and the step is taken again,
or the evaluation made again. Places of planes do not change. Later than ``MOST_DONE`` it is no matter of the plan, and the error
says so. Checked by ``tests/trainer/test_retreat.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch

from layerferry.engine.engine import Engine
from layerferry.errors import PlanError
from layerferry.plan import Plan, size_text
from layerferry.planner.facts import Model
from layerferry.planner.problem import Problem

logger = logging.getLogger("layerferry.trainer")

BUDGETS = (0.7, 0.5, 0.3, 0.1, 0.0)
CHANGING = (
    "micro_batch_rows",
    "activation_budget",
    "expert_parts",
    "richer_layers",
    "turn_layers",
    "chunk_tokens",
    "num_slots",
    "num_slabs",
    "num_waves",
    "first_wave",
)
MOST_DONE = 3
"""Steps, or evaluations, of this process after which an allocation that fails is no longer the plan's fault."""
WORTH_TRYING = 0.95
"""A smaller plan is one that is predicted to need at most this share."""


def smaller(question: Problem, plan: Plan) -> Plan | None:
    """The fastest neighbour of ``plan`` that needs clearly less @device; None: there is none."""
    most = WORTH_TRYING * plan.total("@device")
    neighbours = map(question.complete, _neighbours(question.model, plan))
    found = [one for one in neighbours if one.total("@device") <= most]
    return min(found, key=lambda one: one.seconds.step if one.seconds else 0.0, default=None)


def _neighbours(model: Model, plan: Plan) -> Iterator[Plan]:
    """Fewer rows at a time, fewer activations kept, smaller parts of layers' experts, smaller pieces of the logits,
    fewer buffers; more waves where their sums are carried in fp32."""
    rows = [rows for rows in range(1, plan.micro_batch_rows) if plan.micro_batch_rows % rows == 0]
    budgets = [budget for budget in BUDGETS if budget < plan.activation_budget] if plan.compile else [0.0]
    waves = plan.num_waves * 2 if plan.num_waves * plan.micro_batch_rows * 2 <= plan.rows_per_step else plan.num_waves
    yield from (_of_rows(plan, one) for one in rows)
    if plan.richer_layers:
        yield from (replace(plan, richer_layers=one) for one in {plan.richer_layers - 1, plan.richer_layers // 2, 0})
    if plan.turn_layers:
        yield from (_turning(plan, one) for one in {plan.turn_layers * 3 // 4, plan.turn_layers // 2, 0})
    yield from (replace(plan, richer_layers=0, activation_budget=one) for one in budgets if one < plan.activation_budget)
    if plan.expert_parts > 1 and (parts := model.parts_of_experts(2 * plan.expert_parts)) > plan.expert_parts:
        yield replace(plan, expert_parts=parts)
    yield from (replace(plan, chunk_tokens=one) for one in (2048, 1024, 512, 256) if one < plan.chunk_tokens)
    others = plan.num_slots - plan.turn_layers
    fewer = (one for one in (3, 2) if one < others)
    yield from (replace(plan, num_slots=one + plan.turn_layers, num_slabs=min(plan.num_slabs, 2)) for one in fewer)
    for one in rows:
        yield from (replace(_of_rows(plan, one), activation_budget=budget) for budget in budgets)
    if plan.on_arrival and not plan.resident_gradients:
        return  # the gradients of several waves have no place to be summed
    if waves > plan.num_waves and (plan.fp32 or plan.carry_fp32 or plan.resident_gradients):
        more = replace(plan, num_waves=waves, first_wave=0)
        yield from (replace(more, activation_budget=one) for one in (plan.activation_budget, *budgets))


def _of_rows(plan: Plan, rows: int) -> Plan:
    """``plan`` with micro-batches of ``rows``, a divisor of what they have, and the same waves."""
    return replace(plan, micro_batch_rows=rows, first_wave=plan.first_wave * plan.micro_batch_rows // rows)


def _turning(plan: Plan, turn: int) -> Plan:
    """``plan`` with fewer layers that turn, and without the slots of the others, some of which may live @device and have none."""
    others = max(plan.num_slots - plan.turn_layers, 1)
    return replace(plan, turn_layers=turn, num_slots=min(plan.num_slots, max(turn + others, 3)))


def retreat(engine: Engine, question: Problem, *, what: str, done: int) -> None:
    """Give ``engine`` the next smaller plan that there is room for, after so many steps or evaluations (``what``). Raises
    ``PlanError`` where there is none, or it is too late, ``HalfTakenStep`` where the step cannot be taken again."""
    engine.settle()
    while True:
        before = engine.plan
        plan = smaller(question, before) if done < MOST_DONE else None
        if plan is None:
            raise _no_room(question, before, what, done)
        logger.warning(
            "out of device memory: the %s again under a smaller plan (%s: %s @device, not %s); nothing is lost",
            "step is taken" if what == "step" else f"{what} is made",
            *(_changes(before, plan), size_text(plan.total("@device")), size_text(before.total("@device"))),
        )
        if _fits(engine, plan):
            return


def _fits(engine: Engine, plan: Plan) -> bool:
    """Whether there was room for the buffers of ``plan``, which the engine has now."""
    try:
        engine.replan(plan)
    except torch.OutOfMemoryError:
        return False  # the handler is left before the next one is tried: its traceback holds what was allocated
    return True


def _changes(before: Plan, plan: Plan) -> str:
    both = ((name, getattr(before, name), getattr(plan, name)) for name in CHANGING)
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in both if old != new)


def _no_room(question: Problem, plan: Plan, what: str, done: int) -> PlanError:
    remedy = (
        "device_memory is what the allocator may take, gaps between tensors included: set it higher, or micro_batch_rows or "
        "activation_budget lower, and resume"
        if question.machine.device_source == "device_memory"
        else "another process may have taken some of it; set device_memory, micro_batch_rows or activation_budget lower, and "
        "resume"
    )
    return PlanError(f"out of device memory after {done} {what}s with {size_text(plan.total('@device'))} planned: {remedy}")
