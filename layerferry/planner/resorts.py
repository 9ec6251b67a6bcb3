"""Where nothing fits: what else is tried, and what takes the fewest bytes of all, so that what is refused fits in no way.

Each resort is the question with further pins, those that cost least time first: ends in parts that were too small to be worth
it, token-wise parts in small chunks, layers whose experts travel in parts, and in the end all of that as small as it helps, in a
single slot. Where device and host are one memory, units at home too, which need no buffers. Checked by
``tests/planner/test_remedies.py``, against pins drawn at random too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from layerferry.config import Pins
from layerferry.layout import FP32_PLANE
from layerferry.planner.candidates import (
    ALL,
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
SMALL_MLP_CHUNK, SMALLEST_MLP_CHUNK = 1024, 8
"""Tokens that a token-wise part sees at a time."""
MANY_PARTS, SMALLEST_PART = 256, 8 << 20
"""The smallest parts of the ends: at least so many, and in the fp32 sum of each at most so many bytes. Smaller ones save next to
nothing, and take the time of as many launches."""
SMALLEST = {"num_slabs": 1, "richer_layers": 0, "turn_layers": 0}
SMALLEST_CHUNK = 16
"""Tokens of logits, where the ends are whole: those of a part are small already."""


def last_resorts(question: Problem) -> Iterator[Problem]:
    """``question`` with further pins, of which the user has given none."""
    part, divide, chunk = may_part(question), may_divide(question), _may_chunk(question.pins)
    ends: list[dict[str, Any]] = [{}, {"end_parts": PARTS}] if part else [{}]
    yield from (_pinning(question, home) for home in _at_home(question))
    if part and PARTS not in parts_choices(question):
        yield _pinning(question, ends[-1])
    if chunk:
        yield from (_pinning(question, {**own, "mlp_chunk_tokens": SMALL_MLP_CHUNK}) for own in ends)
    if divide:
        yield from (_pinning(question, {**own, "expert_parts": parts}) for own in ends for parts in EXPERT_PARTS)
    one_slot = {"num_slots": (question.pins.turn_layers or 0) + 1}  # those that turn hold one each
    small_ends = [{"chunk_tokens": SMALLEST_CHUNK}, *([{"end_parts": _smallest_parts(question)}] if part else [])]
    ways: list[dict[str, Any]] = [
        {},
        *([{"mlp_chunk_tokens": SMALLEST_MLP_CHUNK}] if chunk else []),
        *([{"expert_parts": ALL}] if divide else []),
    ]
    homes: list[dict[str, Any]] = [{}, *_at_home(question)]
    for slots, own, way, home in product(({}, one_slot), small_ends, ways, homes):
        if home.get("device_units") != ALL or "expert_parts" not in way:  # layers at home are whole
            yield _pinning(question, {**SMALLEST, **slots, **own, **way, **home})


def _at_home(question: Problem) -> list[dict[str, Any]]:
    """Where both places are one memory, what is @device has no buffers beside it: large ends, or everything."""
    return [{"device_units": 1}, {"device_units": ALL}] if question.machine.one_memory else []


def _smallest_parts(question: Problem) -> int:
    largest = max(unit.layout.bytes(FP32_PLANE) for unit in question.model.units if not unit.is_layer)
    return max(-(-largest // SMALLEST_PART), MANY_PARTS)


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
    """Whether every layer may be computed again, its token-wise parts in chunks, unasked: nobody has said that more is kept."""
    unsaid = pins.mlp_chunk_tokens is None and not pins.activation_budget
    return unsaid and not favours(pins) and (pins.expert_parts or 1) == 1
