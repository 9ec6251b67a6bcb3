"""The first plan that fits, in a stated order of preferences; what the user has pinned is kept as it is.

Outermost first: enough buffers to hide the link (fewer only where nothing else fits), fewer waves (each carries gradients
over the link again), a larger activation budget (less is computed twice), gradients carried between waves exactly, the
preferred micro-batch (up to 32k tokens on CUDA, equal ones; the user's own rows on a CPU), larger chunks of logits. What the
host has no room for lives @device, and so does in the end what the device has room for. Checked by
``tests/planner/test_choose.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from layerferry.plan import Plan
from layerferry.planner.memory import unit_bytes
from layerferry.planner.problem import Problem, fits, host_budget, short_by

BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
MOST_TOKENS = 32768
"""Of a micro-batch on CUDA: beyond, nothing gets faster."""
CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
CPU_CHUNKS = (1024, 256)
CARRIES = ((True, False), (False, True), (False, False))
"""(resident_gradients, carry_fp32): between waves fp32 sums stay @device; or travel, in fp32 where the host has room; or travel
with one bf16 rounding a wave."""
BUFFERS = ((3, 2), (2, 1))
"""(layer slots, slabs): enough for upload, compute and download at once; the least that still overlaps anything."""


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
    budgets: tuple[float, ...] = BUDGETS if compiled else (1.0, 0.0)
    base = Plan(
        fp32=question.fp32,
        on_device=_fewest_at_home(question),
        compile=compiled,
        optimizer_threads=pins.optimizer_threads or max(1, machine.cores - 2),
        row_tokens=shape.row_tokens,
        rows_per_step=shape.rows_per_step,
    )
    rows_choices = [pins.micro_batch_rows] if pins.micro_batch_rows else _row_choices(question)
    chunks = CPU_CHUNKS if machine.is_cpu else CHUNKS
    if pins.activation_budget is not None:
        budgets = (pins.activation_budget,)
    for (slots, slabs), waves, budget, (resident, carry), rows, chunk in product(
        _buffer_choices(question), _wave_choices(question, min(rows_choices)), budgets, CARRIES, rows_choices, chunks
    ):
        if waves > -(-shape.rows_per_step // rows) or ((resident or carry) and waves == 1) or (carry and question.fp32):
            continue
        plan = replace(base, num_slots=slots, num_slabs=slabs, num_waves=waves, activation_budget=budget)
        plan = replace(plan, resident_gradients=resident, carry_fp32=carry)
        yield replace(plan, micro_batch_rows=rows, chunk_tokens=chunk)


def _buffer_choices(question: Problem) -> list[tuple[int, int]]:
    pins, layers = question.pins, question.model.num_layers
    choices = [(pins.num_slots or min(slots, layers), pins.num_slabs or slabs) for slots, slabs in BUFFERS]
    return list(dict.fromkeys(choices))


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


def fill_device(question: Problem, plan: Plan) -> Plan:
    """``plan`` with what is left of the device put to use: units at home there, in the order in which a step needs them.

    Their optimizer runs on the device and nothing of them travels. Last, a slot for every layer that still travels
    saves its second upload.
    """
    if question.machine.is_cpu:
        return plan
    order = _home_order(question)
    for count in range(len(plan.on_device) + 1, len(order) + 1):
        more = question.complete(replace(plan, on_device=order[:count]))
        if not fits(question, more):
            break
        plan = more
    if "num_slots" in question.pins:
        return plan
    travelling = sum(unit.is_layer and unit.index not in plan.on_device for unit in question.model.units)
    resident = question.complete(replace(plan, num_slots=max(travelling, 1)))
    return resident if travelling and fits(question, resident) else plan


def _home_order(question: Problem) -> tuple[int, ...]:
    return tuple(unit.index for unit in question.model.units)


def _fewest_at_home(question: Problem) -> tuple[int, ...]:
    """Units that must live @device because the host has no room for all."""
    if question.machine.is_cpu:
        return ()
    order, budget = _home_order(question), host_budget(question.machine)
    per_unit = [sum(unit_bytes(question.model, spec)[index] for spec in question.specs.values()) for index in order]
    left = sum(per_unit)
    for count, num_bytes in enumerate(per_unit):
        if left <= budget:
            return order[:count]
        left -= num_bytes
    return order
