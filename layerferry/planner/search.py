"""The plan with the fewest predicted seconds that fits; what the user has pinned is kept as it is.

Every combination of ``candidates.py`` is looked at; of the number of units at home @device, and of layers that keep more than
the others, only the largest that fits, because bytes grow with them and seconds do not; of the number of layers that turn with
the head also three quarters and half of it, and of the best choice every number. Waves are equal, but that the best choice is
tried with longer first ones. Units go home in the order of their first use: those that stay @host then have the longest time for
their updates. Of the numbers of layers whose inputs wait @host three are looked at: none, all (but those that keep more or turn),
and where keeping inputs @device does not fit, the fewest that let it. In rows that are computed in chunks, attention is kept in
as many layers as fit.

Layers keep more either in every micro-batch or, turning with the head, in one at a time; the way that needs
more than twice the bytes is not looked at.

Bytes of a combination are sums of parts that are counted once each (``books.py``). Its seconds are first bounded from below,
and the engine's program is played (``time.py``) in the order of these bounds until no bound is below the best. One rounding
a wave (gradients carried in bf16) must save 4 % of the step to be taken. Checked by ``tests/planner/test_search.py``
against playing everything, and by ``tests/planner/test_choose.py``.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from layerferry.plan import Plan
from layerferry.planner.books import Books
from layerferry.planner.candidates import choices, favours, may_fill, may_turn
from layerferry.planner.choice import Choice
from layerferry.planner.problem import Key, Problem, key_of
from layerferry.planner.resorts import last_resorts, leanest

FEWER_PARTS = (2, 4, 8, 16, 32, 64, 128)
"""Of the ends, and of layers' experts: what the best plan is tried with afterwards."""
MOST_FIRST_WAVES = 16
"""Numbers of micro-batches in the first wave that the best plan is tried with."""
HARDLY_FASTER = 0.99
"""Of plans with state @disk, which bounds nearly all of them alike, the first is taken that none can be faster than by more."""
INEXACT = 1.04
"""What a plan with one rounding a wave has its seconds multiplied with where plans are compared."""


Bounded = tuple[float, float, int, Choice]
"""A choice behind the least seconds of its step, its compute where it has state @disk, and its number: what the order goes by."""


def search(question: Problem, keys: Collection[Key] | None = None) -> tuple[Plan, bool]:
    """(the fastest plan that fits, True), or (the one that is least short, False). ``keys``: no others are considered.

    A disk wears out and is slow: it is used only where nothing fits without, or as the user has pinned it.
    """
    if question.machine.disk_available and question.pins.disk_units is None:
        plan, found = _search(replace(question, machine=replace(question.machine, disk_available=0)), keys)
        if found:
            return plan, found
    return _search(question, keys)


def _search(question: Problem, keys: Collection[Key] | None) -> tuple[Plan, bool]:
    base, nearest = _base(question), _Nearest()
    for asked in (question, *last_resorts(question)):
        books = Books(asked)
        if queue := _that_fit(asked, books, base, keys, nearest):
            return question.complete(_best(question, asked, books, base, keys, queue).on(base)), True
    if nearest.choice is None:
        assert keys is not None, "no candidate at all"
        return question.complete(base), False
    return question.complete(nearest.choice.on(base)), False


@dataclass(slots=True)
class _Nearest:
    """The choice that is least short, and by how many bytes."""

    short: float = float("inf")
    choice: Choice | None = None


def _that_fit(asked: Problem, books: Books, base: Plan, keys: Collection[Key] | None, nearest: _Nearest) -> list[Bounded]:
    """The choices that fit, furnished; where none does, ``nearest`` is brought up to date."""
    queue: list[Bounded] = []
    for number, choice in enumerate(choices(asked)):
        if keys is not None and not _is_measured(choice, base, keys):
            continue
        if choice.may_favour and may_turn(asked, choice) and books.is_wasteful(choice):
            continue  # layers may keep more the other way, in far fewer bytes
        least = _least_short(asked, books, choice)
        if least and (queue or least >= nearest.short):
            continue
        found, short = _furnished(asked, books, choice)
        if keys is not None and not _is_measured(found, base, keys):
            continue  # layers that keep more, or turn, have a budget of their own
        if not short:
            compute_s = books.compute_s(found) if found.on_disk else 0.0
            queue.append((books.least_seconds(found) * _handicap(asked, found), compute_s, number, found))
        elif not queue and short < nearest.short:
            nearest.short, nearest.choice = short, found
    return queue


def _best(
    question: Problem, asked: Problem, books: Books, base: Plan, keys: Collection[Key] | None, queue: list[Bounded]
) -> Choice:
    """The fastest in the ``queue``, or one near it that ``question`` leaves open."""
    fastest = _fastest(asked, books, base, queue)
    near = (*_fewer_parts(question, books, fastest), *_fewer_turning(asked, books, fastest, range(1, fastest.turn_layers)))
    others = [other for other in near if keys is None or _is_measured(other, base, keys)]
    best = _quickest(question, base, (fastest, *others))
    longer = chain.from_iterable(_longer_first_wave(question, books, one) for one in {fastest, best})
    return _quickest(question, base, (best, *longer))


def can_fit(question: Problem) -> bool:
    """Whether ``search`` would find a plan, in a hundredth of its time: what is fastest is not asked."""
    disk = question.machine.disk_available and question.pins.disk_units is None
    asked = [replace(question, machine=replace(question.machine, disk_available=0)), question] if disk else [question]
    return any(_can_fit(one) for one in asked)


def _can_fit(question: Problem) -> bool:
    measured = (question,) if question.measured else ()  # what was measured needs no margin, and may need fewer bytes
    return _fits_somehow(question, measured) or any(_fits_somehow(resort) for resort in last_resorts(question))


def _fits_somehow(asked: Problem, measured: Sequence[Problem] = ()) -> bool:
    books, pinned = Books(asked), favours(asked.pins)
    return any(
        not _least_short(asked, books, choice) and not _furnished(asked, books, choice)[1]
        for lean in (*leanest(asked), *measured)
        for choice in choices(lean)
        if pinned or not choice.may_favour  # to keep more takes no fewer bytes
    )


def _least_short(question: Problem, books: Books, choice: Choice) -> int:
    """Bytes that ``choice`` lacks however it is furnished; layers that are pinned to keep more have fewer inputs @host."""
    if choice.host_inputs and favours(question.pins):
        return 0
    return books.least_short(choice, may_fill=may_fill(question, choice))


def _furnished(question: Problem, books: Books, choice: Choice) -> tuple[Choice, int]:
    """``choice`` with what fills the device, with inputs @host where it does not fit without, and the bytes that are short."""
    found, short = books.furnished(choice)
    if short and may_fill(question, choice) and (filled := books.filled(found)) is not None:
        return filled, 0
    return found, short


def _quickest(question: Problem, base: Plan, among: Sequence[Choice]) -> Choice:
    return min(among, key=lambda one: question.seconds(one.on(base)).step)


def _is_measured(choice: Choice, base: Plan, keys: Collection[Key]) -> bool:
    return all(key_of(level) in keys for level in choice.on(base).levels)


def _fewer_parts(question: Problem, books: Books, choice: Choice) -> list[Choice]:
    """``choice`` with larger parts of the ends, or of layers' experts, where they fit."""
    others: list[Choice] = []
    if choice.end_parts > 1 and not question.pins.end_parts:
        fewer = dict.fromkeys(map(question.model.parts_of_ends, FEWER_PARTS))
        others += [choice._replace(end_parts=parts) for parts in fewer if parts < choice.end_parts]
    if choice.expert_parts > 1 and not question.pins.expert_parts:
        fewer = dict.fromkeys(map(question.model.parts_of_experts, FEWER_PARTS))
        others += [choice._replace(expert_parts=parts) for parts in fewer if parts < choice.expert_parts]
    return [other for other in others if not books.short(other)]


def _fewer_turning(question: Problem, books: Books, choice: Choice, numbers: Iterable[int]) -> list[Choice]:
    """``choice`` with these ``numbers`` of layers that turn, where they fit: the more turn, the sooner their updates are needed,
    by the first micro-batch."""
    if not choice.turn_layers or question.pins.turn_layers is not None:
        return []
    return [other for turn in numbers if turn and not books.short(other := books.turning(choice, turn))]


def _longer_first_wave(question: Problem, books: Books, choice: Choice) -> list[Choice]:
    """``choice`` with more of its micro-batches in the first wave, where those fit: updates have longer to hide."""
    micro_batches = -(-question.shape.rows_per_step // choice.micro_batch_rows)
    equal, most = -(-micro_batches // choice.num_waves), micro_batches - choice.num_waves + 1
    if choice.num_waves == 1 or question.pins.first_wave is not None or most <= equal:
        return []
    numbers = range(equal + 1, most + 1, -(-(most - equal) // MOST_FIRST_WAVES))
    return [other for first in numbers if not books.short(other := choice._replace(first_wave=first))]


def _fastest(question: Problem, books: Books, base: Plan, queue: list[Bounded]) -> Choice:
    """Of choices with lower bounds of their seconds, which hold for fewer layers that turn too."""
    heapq.heapify(queue)
    best, fastest = float("inf"), queue[0][-1]
    while queue and queue[0][0] < best * (HARDLY_FASTER if fastest.on_disk else 1.0):
        most = heapq.heappop(queue)[-1]
        for choice in (most, *_fewer_turning(question, books, most, (most.turn_layers * 3 // 4, most.turn_layers // 2))):
            handicap = _handicap(question, choice)
            if books.least_seconds(choice) * handicap >= best:
                continue
            cost = question.seconds(choice.on(base)).step * handicap
            if cost < best:
                best, fastest = cost, choice
    return fastest


def _handicap(question: Problem, choice: Choice) -> float:
    return 1.0 if choice.num_waves == 1 or choice.resident_gradients or choice.carry_fp32 or question.fp32 else INEXACT


def _base(question: Problem) -> Plan:
    """What is not searched for."""
    machine, pins, shape = question.machine, question.pins, question.shape
    return Plan(
        fp32=question.fp32,
        on_arrival=question.on_arrival,
        compile=question.compiles,
        optimizer_threads=pins.optimizer_threads or max(1, machine.cores - 2),
        row_tokens=shape.row_tokens,
        rows_per_step=shape.rows_per_step,
    )
