"""Every combination that a search looks at: what a question leaves open, cut down to what may be the fastest or the leanest.

Micro-batch, waves, activation budget, chunk of logits, slots and slabs, parts of the ends, and the way of carrying gradients are
all combined. Rows longer than ``LONG_ROW`` may have their layers computed again with token-wise parts in chunks: then every
number of inputs @host is a choice. Where nothing fits, parts of ends that were too small to be worth it and small chunks are
tried too: what is refused fits in no way that is known here. What the user has pinned is kept as it is. Checked by
``tests/planner/test_search.py``, and whether the leanest are that by ``test_remedies.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from layerferry.config import Pins
from layerferry.layout import FP32_PLANE
from layerferry.plan import FREE_BUDGET
from layerferry.planner.choice import Choice
from layerferry.planner.problem import Problem, device_budget

BUDGETS = (1.0, 0.7, 0.3, 0.0)
MOST_TOKENS = 32768
"""Of a micro-batch on CUDA: beyond, nothing gets faster."""
LONG_ROW = 32768
"""Tokens of a row beyond which a layer's inner activations are gigabytes, and attention is much of its time."""
MLP_CHUNK, SMALL_MLP_CHUNK = 8192, 1024
"""Tokens that a token-wise part sees at a time there: enough to fill the matrix units; and where nothing else fits."""
MOST_ROW_CHOICES = 16
"""Sizes of a micro-batch that are looked at; of more divisors every second, third ... is."""
CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
CPU_CHUNKS = (1024, 256)
CARRIES = ((True, False), (False, True), (False, False))
"""(resident_gradients, carry_fp32): between waves fp32 sums stay @device; or travel, in fp32 where the host has room; or travel
with one bf16 rounding a wave."""
ALL = 1 << 20
"""Slots for every layer that travels: no weight travels twice in a step."""
CPU_BUFFERS = ((3, 2), (2, 1))
BUFFERS = (*CPU_BUFFERS, (4, 2), (6, 2), (ALL, 2))
"""(layer slots, slabs): enough for upload, compute and download at once; the least that still overlaps anything; more."""
PARTS = 16
"""Parts of the ends that every combination is tried with: small ones cost hardly more than large ones."""
EXPERT_PARTS = (4, 16)
"""Parts of a layer's experts that are tried where nothing fits without: more cost time, and save less each time."""
WORTH_PARTS = 0.1
"""Share of the device that whole ends' buffers must take for parts to be tried where something fits: beyond, ends go home."""


def choices(question: Problem) -> Iterator[Choice]:
    """Everything that is considered, without units at home; of equals the first is taken."""
    pins, shape = question.pins, question.shape
    budgets: tuple[float, ...] = BUDGETS if question.compiles else (1.0, 0.0)
    expert_parts = pins.expert_parts or 1
    if expert_parts > 1:
        budgets = (_free_budget(question),)  # every layer is computed again
    if pins.activation_budget is not None:
        budgets = (pins.activation_budget,)
    every = question.model.num_layers
    inputs, attention = min(pins.host_inputs or 0, every), min(pins.kept_attention or 0, every)
    rows_choices = [pins.micro_batch_rows] if pins.micro_batch_rows else _row_choices(question)
    buffer_choices, parts_choices, may_travel = _buffer_choices(question), _parts_choices(question), _may_travel(question)
    for rows in rows_choices:
        chunks = _chunk_choices(question, min(rows, shape.rows_per_step) * shape.row_tokens)
        for waves in _wave_choices(question, rows, last=rows == min(rows_choices)):
            carries, most_first = _carry_choices(question, waves), -(-shape.rows_per_step // rows) - waves + 1
            first = min(pins.first_wave or 0, most_first) if waves > 1 else 0
            kinds = product(parts_choices, budgets, chunks, buffer_choices, carries)
            for parts, budget, chunk, (slots, slabs), (resident, carry) in kinds:
                own = (rows, waves, budget, chunk, slots, slabs, resident, carry, parts)
                choice = Choice(
                    *own,
                    expert_parts=expert_parts,
                    host_inputs=inputs,
                    kept_attention=attention,
                    mlp_chunk_tokens=pins.mlp_chunk_tokens or 0,
                    first_wave=first,
                )
                yield from _with_richer(question, choice)
                if budget == max(budgets) and may_travel:
                    again = choice if "activation_budget" in pins else choice._replace(activation_budget=_free_budget(question))
                    yield from _with_richer(question, again._replace(host_inputs=every))
                    if shape.row_tokens > LONG_ROW and pins.mlp_chunk_tokens != 0 and not favours(pins) and expert_parts == 1:
                        again = again._replace(mlp_chunk_tokens=pins.mlp_chunk_tokens or MLP_CHUNK)
                        yield from (again._replace(host_inputs=one) for one in range(every + 1))


def last_resort(question: Problem, queue: Sequence[object]) -> Iterator[Choice]:
    """Where nothing has fitted by the time that these are asked for: ends in parts, however small they are; then token-wise
    parts in small chunks; then layers whose experts travel in parts."""
    pins = question.pins
    parted = [replace(pins, end_parts=PARTS)] if _may_part(question) and PARTS not in _parts_choices(question) else []
    for further in parted:
        if not queue:
            yield from choices(replace(question, pins=further))
    chunks = _may_travel(question) and pins.mlp_chunk_tokens is None and not favours(pins)
    for further in (pins, *parted) if chunks else ():
        if not queue:
            chunked = choices(replace(question, pins=replace(further, mlp_chunk_tokens=SMALL_MLP_CHUNK)))
            # each layer is computed again anyway: of what it keeps, only inputs are a choice
            yield from (choice for choice in chunked if choice.host_inputs or not choice.activation_budget)
    for further, experts in product((pins, *parted), EXPERT_PARTS) if _may_divide(question) else ():
        if not queue:
            yield from choices(replace(question, pins=replace(further, expert_parts=experts)))


def leanest(question: Problem) -> Iterator[Problem]:
    """``question`` with what takes the fewest bytes pinned: where that does not fit, nothing does. Fewest waves want no sums
    between them, most waves have least in each."""
    pins = question.pins
    rows = pins.micro_batch_rows or min(_row_choices(question))
    slots, slabs = min(_buffer_choices(question))
    chunk = min(_chunk_choices(question, min(rows, question.shape.rows_per_step) * question.shape.row_tokens))
    carry = False if pins.carry_fp32 is None else pins.carry_fp32
    lean = replace(pins, micro_batch_rows=rows, num_slots=slots, num_slabs=slabs, chunk_tokens=chunk, carry_fp32=carry)
    waves = _wave_choices(question, rows, last=True)
    for number in dict.fromkeys((waves[0], waves[-1])):
        yield replace(question, pins=replace(lean, num_waves=number))


def favours(pins: Pins) -> bool:
    """Whether the user says that some layers keep more than others: then not every layer is computed again."""
    return bool(pins.richer_layers or pins.turn_layers)


def _with_richer(question: Problem, choice: Choice) -> Iterator[Choice]:
    """``choice``, and with layers that keep more, or turn, where those may be."""
    pins = question.pins
    richer = _free_budget(question) if pins.richer_budget is None else pins.richer_budget
    if pins.richer_layers:
        yield choice._replace(richer_budget=richer, before_home=True)
        return
    if pins.turn_layers:
        yield choice._replace(turns=True, before_home=True)
        return
    yield choice
    rebuilt = choice.mlp_chunk_tokens or choice.kept_attention or choice.expert_parts > 1
    fixed = pins.richer_layers == 0 or (pins.activation_budget is not None and pins.richer_budget is None)
    if not rebuilt and not fixed and (choice.host_inputs or richer > choice.activation_budget):
        yield choice._replace(richer_budget=richer)
        if not choice.host_inputs:
            yield choice._replace(richer_budget=richer, before_home=True)
    if not rebuilt and may_turn(question, choice):
        yield choice._replace(turns=True)
        if not choice.host_inputs:
            yield choice._replace(turns=True, before_home=True)


def may_turn(question: Problem, choice: Choice) -> bool:
    """Whether the plan may say how many layers turn, and they could save anything: several micro-batches share a wave, and
    something is computed again."""
    pins, micro_batches = question.pins, -(-question.shape.rows_per_step // choice.micro_batch_rows)
    if question.machine.is_cpu or pins.turn_layers is not None or pins.richer_layers or choice.end_parts > 1:
        return False
    return micro_batches > choice.num_waves and (choice.host_inputs > 0 or choice.activation_budget < _free_budget(question))


def _free_budget(question: Problem) -> float:
    """What layers keep that keep more: what costs no time."""
    return FREE_BUDGET if question.compiles else 1.0


def _carry_choices(question: Problem, waves: int) -> list[tuple[bool, bool]]:
    """(resident_gradients, carry_fp32), as far as they are free."""
    resident = question.pins.resident_gradients
    carry = False if question.fp32 else question.pins.carry_fp32  # they have four bytes already
    if waves == 1:
        return [(bool(resident), bool(carry))]
    known = CARRIES[:1] if question.on_arrival else CARRIES
    return [one for one in known if resident in (None, one[0]) and carry in (None, one[1])]


def _may_travel(question: Problem) -> bool:
    """Whether inputs may be sent to the host unasked: nobody has said what is kept, and the host is another memory."""
    pins = question.pins
    return pins.host_inputs is None and not pins.activation_budget and not question.machine.is_cpu


def may_fill(question: Problem, choice: Choice) -> bool:
    """Whether the fewest inputs @host that let ``choice`` fit are looked for; of long rows in chunks every number is a choice."""
    every_number = choice.mlp_chunk_tokens and question.shape.row_tokens > LONG_ROW
    keeps = choice.activation_budget or choice.richer_budget
    return _may_travel(question) and not (choice.host_inputs or keeps or every_number)


def _buffer_choices(question: Problem) -> list[tuple[int, int]]:
    pins, known = question.pins, CPU_BUFFERS if question.machine.is_cpu else BUFFERS
    choices = [(pins.num_slots or min(slots, question.model.num_layers), pins.num_slabs or slabs) for slots, slabs in known]
    return list(dict.fromkeys(choices))


def _parts_choices(question: Problem) -> list[int]:
    if question.pins.end_parts:
        return [question.pins.end_parts]
    ends = sum(unit.layout.bytes(FP32_PLANE) for unit in question.model.units if not unit.is_layer)
    worth = ends > WORTH_PARTS * device_budget(question.machine)
    return [1, PARTS] if worth and _may_part(question) else [1]


def _may_part(question: Problem) -> bool:
    """Whether the ends may travel in parts unasked; layers turn with a head that is there whole."""
    return question.pins.end_parts is None and not question.pins.turn_layers and question.model.undividable is None


def _may_divide(question: Problem) -> bool:
    """Whether a layer's experts may travel in parts unasked: nothing is asked for that needs whole layers."""
    pins = question.pins
    whole = favours(pins) or pins.mlp_chunk_tokens or pins.kept_attention or (pins.device_units or 0) > 1
    return pins.expert_parts is None and question.model.undividable_layers is None and not whole


def _row_choices(question: Problem) -> list[int]:
    """Rows of a micro-batch, most first: equal micro-batches of at most ``MOST_TOKENS``, or of the user's rows on a CPU."""
    shape = question.shape
    most = question.user_rows if question.machine.is_cpu else max(MOST_TOKENS // max(shape.row_tokens, 1), 1)
    found = [rows for rows in reversed(divisors(shape.rows_per_step)) if rows <= most] or [1]
    stride = -(-len(found) // MOST_ROW_CHOICES)
    return list(dict.fromkeys([*found[::stride], found[-1]]))


def divisors(number: int) -> list[int]:
    """Least first, in the time of a square root: a batch may have ten million rows."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _chunk_choices(question: Problem, tokens: int) -> list[int]:
    if question.pins.chunk_tokens:
        return [question.pins.chunk_tokens]
    chunks = CPU_CHUNKS if question.machine.is_cpu else CHUNKS
    return [chunk for chunk in chunks if chunk == max(chunks) or chunk < tokens]


def _wave_choices(question: Problem, rows: int, *, last: bool) -> list[int]:
    """Numbers of waves, few first. What is pinned is kept where micro-batches of ``rows`` are enough for it; where none are, by
    the ``last`` as far as it goes."""
    most, pinned, first = -(-question.shape.rows_per_step // rows), question.pins.num_waves, question.pins.first_wave
    if pinned and pinned > most:
        return [most] if last else []
    numbers = [pinned] if pinned else _numbers_of_waves(most)
    if not first:
        return numbers
    several = [waves for waves in numbers if waves > 1]
    return [waves for waves in several if waves <= most - first + 1] or ((several[:1] or numbers) if last else [])


def _numbers_of_waves(micro_batches: int) -> list[int]:
    sizes = [size for power in range(micro_batches.bit_length()) for size in (1 << power, 3 << power)]
    return sorted({1, *(-(-micro_batches // size) for size in sizes)})
