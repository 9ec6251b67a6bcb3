"""Where nothing fits: what else is tried, and what takes the fewest bytes of all, so that what is refused fits in no way.

Each resort is the question with further pins, those that cost least time first: ends in parts that were too small to be worth
it, token-wise parts in small chunks, layers whose experts travel in parts, and in the end all of that as small as it helps, in a
single slot. Checked by ``tests/planner/test_remedies.py``, against pins drawn at random too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from layerferry.config import Pins
from layerferry.planner.candidates import (
    PARTS,
    buffer_choices,
    chunk_choices,
    favours,
    may_divide,
    may_part,
    parts_choices,
    row_choices,
    wave_choices,
)
from layerferry.planner.problem import Problem

EXPERT_PARTS = (4, 16)
"""Parts of a layer's experts that are tried first: more cost time, and save less each time."""
ONE_BY_ONE = 1 << 20
"""Parts of them: a part each."""
SMALL_MLP_CHUNK, SMALLEST_MLP_CHUNK = 1024, 64
"""Tokens that a token-wise part sees at a time."""
SMALLEST = {"end_parts": 256, "chunk_tokens": 16, "num_slabs": 1, "richer_layers": 0, "turn_layers": 0}
"""Smaller pieces save next to nothing, some MB of parts and logits, and take the time of as many launches. Small chunks of logits
are for ends that are whole: of a part they are small already."""


def last_resorts(question: Problem) -> Iterator[Problem]:
    """``question`` with further pins, of which the user has given none."""
    part, divide, chunk = may_part(question), may_divide(question), _may_chunk(question.pins)
    ends: list[dict[str, Any]] = [{}, {"end_parts": PARTS}] if part else [{}]
    if part and PARTS not in parts_choices(question):
        yield _pinning(question, ends[-1])
    if chunk:
        yield from (_pinning(question, {**own, "mlp_chunk_tokens": SMALL_MLP_CHUNK}) for own in ends)
    if divide:
        yield from (_pinning(question, {**own, "expert_parts": parts}) for own in ends for parts in EXPERT_PARTS)
    smallest = {name: value for name, value in SMALLEST.items() if name != ("chunk_tokens" if part else "end_parts")}
    for least in (smallest, *([] if favours(question.pins) else [{**smallest, "num_slots": 1}])):
        yield _pinning(question, least)
        if chunk:
            yield _pinning(question, {**least, "mlp_chunk_tokens": SMALLEST_MLP_CHUNK})
        if divide:
            yield _pinning(question, {**least, "expert_parts": ONE_BY_ONE})


def _pinning(question: Problem, wanted: Mapping[str, Any]) -> Problem:
    """``question`` with what is ``wanted``, as far as the user has not pinned it."""
    free = {name: value for name, value in wanted.items() if name not in question.pins}
    return replace(question, pins=replace(question.pins, **free))


def leanest(question: Problem) -> Iterator[Problem]:
    """``question`` with what takes the fewest bytes pinned: where that does not fit, nothing that it leaves open does. Fewest
    waves want no sums between them, most waves have least in each."""
    pins = question.pins
    rows = pins.micro_batch_rows or min(row_choices(question))
    slots, slabs = min(buffer_choices(question))
    chunk = min(chunk_choices(question, min(rows, question.shape.rows_per_step) * question.shape.row_tokens))
    carry = False if pins.carry_fp32 is None else pins.carry_fp32
    lean = replace(pins, micro_batch_rows=rows, num_slots=slots, num_slabs=slabs, chunk_tokens=chunk, carry_fp32=carry)
    waves = wave_choices(question, rows, last=True)
    for number in dict.fromkeys((waves[0], waves[-1])):
        yield replace(question, pins=replace(lean, num_waves=number))


def _may_chunk(pins: Pins) -> bool:
    """Whether every layer may be computed again, its token-wise parts in chunks, unasked: nobody has said what is kept."""
    unsaid = pins.mlp_chunk_tokens is None and pins.host_inputs is None and not pins.activation_budget
    return unsaid and not favours(pins) and (pins.expert_parts or 1) == 1
