"""The first plan that fits, in a stated order of preferences; what the user has pinned is kept as it is.

Outermost first: fewer waves (each carries gradients over the link again), a larger activation budget (less is computed
twice), the preferred micro-batch (up to 32k tokens on CUDA, equal ones; the user's own rows on a CPU), larger chunks of
logits, and last whether weights may stay resident. Checked by ``tests/planner/test_choose.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from layerferry.plan import Plan
from layerferry.planner.problem import Problem, fits, short_by

BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
MOST_TOKENS = 32768
"""Of a micro-batch on CUDA: beyond, nothing gets faster."""
CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
CPU_CHUNKS = (1024, 256)
NUM_SLOTS = 3
NUM_SLABS = 2


def search(question: Problem) -> tuple[Plan, bool]:
    """(the first candidate that fits, True), or (the one that is least short, False)."""
    smallest: Plan | None = None
    for candidate in candidates(question):
        plan = question.complete(candidate)
        if fits(question, plan):
            return plan, True
        if smallest is None or short_by(question, plan) < short_by(question, smallest):
            smallest = plan
    assert smallest is not None, "no candidate at all"
    return smallest, False


def candidates(question: Problem) -> Iterator[Plan]:
    """Every plan that is considered, best first."""
    machine, pins, shape = question.machine, question.pins, question.shape
    compiled = pins.compile if pins.compile is not None else not machine.is_cpu
    budgets = BUDGETS if compiled else (1.0, 0.0)
    base = Plan(
        fp32=question.fp32,
        num_slots=pins.num_slots or min(NUM_SLOTS, question.model.num_layers),
        num_slabs=pins.num_slabs or NUM_SLABS,
        compile=compiled,
        optimizer_threads=pins.optimizer_threads or max(1, machine.cores - 2),
        row_tokens=shape.row_tokens,
        rows_per_step=shape.rows_per_step,
    )
    rows_choices = [pins.micro_batch_rows] if pins.micro_batch_rows else _row_choices(question)
    for waves in _wave_choices(question, min(rows_choices)):
        for budget in (pins.activation_budget,) if pins.activation_budget is not None else budgets:
            for rows in rows_choices:
                if waves > -(-shape.rows_per_step // rows):
                    continue
                for chunk in CPU_CHUNKS if machine.is_cpu else CHUNKS:
                    plan = replace(base, num_waves=waves, activation_budget=budget, micro_batch_rows=rows, chunk_tokens=chunk)
                    yield from _carried(question, plan)


def _carried(question: Problem, plan: Plan) -> Iterator[Plan]:
    """Several waves carry gradients exactly (4 bytes) where the host has room, else with one bf16 rounding a wave."""
    if plan.num_waves > 1 and not plan.fp32:
        yield replace(plan, carry_fp32=True)
    yield plan


def _row_choices(question: Problem) -> list[int]:
    """Rows of a micro-batch, preferred first: equal micro-batches of at most ``MOST_TOKENS``, or of the user's rows on a CPU."""
    shape = question.shape
    divisors = [rows for rows in range(1, shape.rows_per_step + 1) if shape.rows_per_step % rows == 0]
    if question.machine.is_cpu:
        return [rows for rows in reversed(divisors) if rows <= question.user_rows] or [1]
    most = max(MOST_TOKENS // max(shape.row_tokens, 1), 1)
    return [rows for rows in reversed(divisors) if rows <= most] or [1]


def _wave_choices(question: Problem, fewest_rows: int) -> list[int]:
    if question.pins.num_waves:
        return [min(question.pins.num_waves, max(1, -(-question.shape.rows_per_step // fewest_rows)))]
    most = -(-question.shape.rows_per_step // fewest_rows)
    return [waves for waves in (1, 2, 4, 8, 16, 32, 64) if waves <= most]


def resident_if_free(question: Problem, plan: Plan) -> Plan:
    """A slot for every layer saves the second upload; taken only where it costs nothing else."""
    if "num_slots" in question.pins or question.machine.is_cpu:
        return plan
    resident = question.complete(replace(plan, num_slots=question.model.num_layers))
    return resident if fits(question, resident) else plan
