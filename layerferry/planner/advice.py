"""What would make a step faster that waits for updates, each tried before it is named.

With exact clipping no update can begin before the backward has ended, so the CPU has the next forward's time for all of them,
a quarter of the step. Few tokens a step make that short, and no plan can help it; settings can, and each has its price: a
format that moves fewer bytes, updates on arrival (nothing is clipped), more tokens a step. ``plan`` says what each would
bring here.

Checked by ``tests/planner/test_advice.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from layerferry.plan import Plan
from layerferry.planner.problem import Problem
from layerferry.planner.remedies import leaner_formats
from layerferry.planner.search import search
from layerferry.planner.updates import with_update_rate

WORTH_SAYING = 0.1
"""Share of the step that is waited for updates."""
BETTER = 1.05
"""Times as many tokens a second."""
MORE_ROWS = 4


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings as a configuration has them, what they cost, and tokens a second with them."""

    settings: str
    price: str
    tokens_per_s: float


def faster(question: Problem, plan: Plan) -> tuple[Advice, ...]:
    """For a ``plan`` that fits; the best first, empty where updates are hardly waited for."""
    seconds = plan.seconds
    if question.machine.is_cpu or seconds is None or seconds.waits_for_updates < WORTH_SAYING * seconds.step:
        return ()
    now, found = tokens_per_s(plan), []
    for settings, price, other in _others(question):
        instead, fits = search(other)
        if fits and tokens_per_s(instead) > BETTER * now:
            found.append(Advice(settings, price, tokens_per_s(instead)))
    return tuple(sorted(found, key=lambda one: -one.tokens_per_s))


def tokens_per_s(plan: Plan) -> float:
    assert plan.seconds is not None
    return plan.rows_per_step * plan.row_tokens / plan.seconds.step


def _others(question: Problem) -> Iterator[tuple[str, str, Problem]]:
    """(settings, price, the question that they ask)."""
    for name, lean in leaner_formats(question.specs):
        machine = with_update_rate(question.machine, lean)
        yield f"optim: {name}", "moments of 8 bits", replace(question, specs=lean, machine=machine)
    if not question.on_arrival and not question.pins.carry_fp32 and question.pins.resident_gradients is None:
        settings = "update_on_arrival: true, max_grad_norm: 0"
        yield settings, "nothing is clipped, no step skipped", replace(question, on_arrival=True)
    rows = MORE_ROWS * question.shape.rows_per_step
    accumulation = rows // question.user_rows
    more = replace(question, shape=replace(question.shape, rows_per_step=rows))
    yield f"gradient_accumulation_steps: {accumulation}", f"{MORE_ROWS} times the tokens a step", more
