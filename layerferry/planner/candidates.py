"""Every combination that a search looks at: what a question leaves open, cut down to what may be the fastest or the leanest.

Micro-batch, waves, activation budget, chunk of logits, slots and slabs, parts of the ends, and the way of carrying gradients are
all combined. Rows longer than ``LONG_ROW`` may have their layers computed again with token-wise parts in chunks: then every
number of inputs @host is a choice. What the user has pinned is kept as it is. What is tried where nothing of this fits is in
``resorts.py``. Checked by ``tests/planner/test_search.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
MLP_CHUNK = 8192
"""Tokens that a token-wise part sees at a time there: enough to fill the matrix units."""
MOST_ROW_CHOICES = 16
"""Sizes of a micro-batch that are looked at; of more divisors every second, third ... is."""
CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
CPU_CHUNKS = (1024, 256)
CARRIES = ((True, False), (False, True), (False, False))
"""(resident_gradients, carry_fp32): between waves fp32 sums stay @device; or travel, in fp32 where the host has room; or travel
with one bf16 rounding a wave."""
ALL = 1 << 20
"""More than there are of anything. Slots for every layer that travels: no weight travels twice in a step."""
CPU_BUFFERS = ((3, 2), (2, 1))
BUFFERS = (*CPU_BUFFERS, (4, 2), (6, 2), (ALL, 2))
"""(layer slots, slabs): enough for upload, compute and download at once; the least that still overlaps anything; more."""
PARTS = 16
"""Parts of the ends that every combination is tried with: small ones cost hardly more than large ones."""
WORTH_PARTS = 0.1
"""Share of the device that whole ends' buffers must take for parts to be tried where something fits: beyond, ends go home."""


def choices(question: Problem) -> Iterator[Choice]:
    """Everything that is considered, without units at home; of equals the first is taken."""
    pins, shape = question.pins, question.shape
    budgets: tuple[float, ...] = BUDGETS if question.compiles else (1.0, 0.0)
    expert_parts = question.model.parts_of_experts(pins.expert_parts or 1)
    if expert_parts > 1 or pins.mlp_chunk_tokens:
        budgets = (_free_budget(question),)  # every layer is computed again
    if pins.activation_budget is not None:
        budgets = (pins.activation_budget,)
    every = question.model.num_layers
    inputs, attention = min(pins.host_inputs or 0, every), min(pins.kept_attention or 0, every)
    all_rows = [pins.micro_batch_rows] if pins.micro_batch_rows else row_choices(question)
    all_buffers, all_parts, may_travel = buffer_choices(question), parts_choices(question), _may_travel(question)
    for rows in all_rows:
        chunks = chunk_choices(question, min(rows, shape.rows_per_step) * shape.row_tokens)
        for waves in wave_choices(question, rows, last=rows == min(all_rows)):
            carries, most_first = _carry_choices(question, waves), -(-shape.rows_per_step // rows) - waves + 1
            first = min(pins.first_wave or 0, most_first) if waves > 1 else 0
            kinds = product(all_parts, budgets, chunks, all_buffers, carries)
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
    """Whether inputs may be sent to the host unasked: nobody has said what is kept, and the host is another memory, or
    its budget another one."""
    pins = question.pins
    is_one = question.machine.is_cpu and question.machine.shares_budget
    return pins.host_inputs is None and not pins.activation_budget and not is_one


def may_fill(question: Problem, choice: Choice) -> bool:
    """Whether the fewest inputs @host that let ``choice`` fit are looked for; of long rows in chunks every number is a choice."""
    every_number = choice.mlp_chunk_tokens and question.shape.row_tokens > LONG_ROW
    rebuilt = choice.mlp_chunk_tokens or choice.expert_parts > 1
    keeps = not rebuilt and (choice.activation_budget or choice.richer_budget)
    return _may_travel(question) and not (choice.host_inputs or keeps or every_number)


def buffer_choices(question: Problem) -> list[tuple[int, int]]:
    pins, known = question.pins, CPU_BUFFERS if question.machine.is_cpu else BUFFERS
    choices = [(pins.num_slots or min(slots, question.model.num_layers), pins.num_slabs or slabs) for slots, slabs in known]
    return list(dict.fromkeys(choices))


def parts_choices(question: Problem) -> list[int]:
    if question.pins.end_parts:
        return [question.model.parts_of_ends(question.pins.end_parts)]
    ends = sum(unit.layout.bytes(FP32_PLANE) for unit in question.model.units if not unit.is_layer)
    worth = ends > WORTH_PARTS * device_budget(question.machine)
    return [1, PARTS] if worth and may_part(question) else [1]


def may_part(question: Problem) -> bool:
    """Whether the ends may travel in parts unasked; layers turn with a head that is there whole."""
    return question.pins.end_parts is None and not question.pins.turn_layers and question.model.undividable is None


def may_divide(question: Problem) -> bool:
    """Whether a layer's experts may travel in parts unasked: nothing is asked for that needs whole layers."""
    pins = question.pins
    whole = favours(pins) or pins.mlp_chunk_tokens or pins.kept_attention
    whole = whole or (pins.device_units or 0) > question.model.most_beside_parts
    return pins.expert_parts is None and question.model.undividable_layers is None and not whole


def row_choices(question: Problem) -> list[int]:
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


def chunk_choices(question: Problem, tokens: int) -> list[int]:
    if question.pins.chunk_tokens:
        return [question.pins.chunk_tokens]
    chunks = CPU_CHUNKS if question.machine.is_cpu else CHUNKS
    return [chunk for chunk in chunks if chunk == max(chunks) or chunk < tokens]


def wave_choices(question: Problem, rows: int, *, last: bool) -> list[int]:
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
