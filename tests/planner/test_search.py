"""The search against playing everything; its books against the byte table; its time on a deep model."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from layerferry.planner.books import Books
from layerferry.planner.candidates import MOST_ROW_CHOICES, PARTS, choices, divisors
from layerferry.planner.problem import Problem, key_of, problem
from layerferry.planner.search import INEXACT, _base, search
from tests.planner.subjects import books_beside_the_table, config, machine, qwen, specs


def ask(name: str = "qwen2.5-7b", rows: int = 4, device_gib: float = 24, **there: float) -> Problem:
    return problem(qwen(name), specs(), machine(device_gib=device_gib, **there), config(rows=rows), 1024)


@pytest.mark.parametrize(
    ("name", "device_gib", "on_arrival"),
    [("qwen2.5-3b", 12, False), ("qwen2.5-3b", 30, True), ("qwen2.5-7b", 12, True), ("qwen2.5-7b", 30, False)],
)
def test_bounds_do_not_hide_the_fastest_plan(name: str, device_gib: float, on_arrival: bool) -> None:
    """Oracle: the seconds of every choice that fits, none left out."""
    question = replace(ask(name, device_gib=device_gib), on_arrival=on_arrival)
    question = replace(question, pins=replace(question.pins, micro_batch_rows=1))
    books, base = Books(question), _base(question)
    least = float("inf")
    for choice in choices(question):
        furnished, short = books.furnished(choice)
        if not short:
            plan = furnished.on(base)
            cost = question.seconds(plan).step
            assert books.least_seconds(furnished) <= cost * (1 + 1e-9)
            least = min(least, cost * (1.0 if plan.is_exact else INEXACT))
    plan, found = search(question)
    assert found and plan.seconds is not None
    found_s = plan.seconds.step * (1.0 if plan.is_exact else INEXACT)
    if plan.end_parts in (1, PARTS) and not plan.turn_layers and not plan.first_wave:
        assert found_s == pytest.approx(least)
    assert found_s <= least * (1 + 1e-9), "parts, layers that turn, longer first waves: tried with the best plan"


@pytest.mark.parametrize("name", ["qwen2.5-3b", "qwen2.5-7b"])
@pytest.mark.parametrize(
    ("device_gib", "host_gib", "on_arrival"), [(12, 126, False), (60, 60, False), (139, 126, False), (30, 60, True)]
)
def test_books_are_the_byte_table(name: str, device_gib: float, host_gib: float, on_arrival: bool) -> None:
    question = replace(ask(name, rows=8, device_gib=device_gib, host_gib=host_gib), on_arrival=on_arrival)
    assert list(books_beside_the_table(question, list(choices(question))[::97]))


@pytest.mark.parametrize("pins", [{"end_parts": 4}, {"expert_parts": 3}, {"end_parts": 4, "expert_parts": 3}])
def test_books_are_the_byte_table_where_parts_are_pinned_and_everything_is_at_home(pins: dict[str, int]) -> None:
    for device_gib in (24, 139, 1000):
        question = ask("qwen3-30b-a3b", rows=8, device_gib=device_gib, host_gib=600)
        question = replace(question, pins=replace(question.pins, **pins))
        homes = {plan.device_units for plan, _, _ in books_beside_the_table(question, list(choices(question))[::97])}
    assert pins.keys() != {"end_parts"} or len(question.model.units) in homes


def long_row(tokens: int = 524288, *, layers: int = 28, **there: float) -> Problem:
    model = qwen("qwen2.5-7b", layers)
    model = replace(model, attention_bytes=model.boundary + 4 * 28)
    return problem(model, specs(), machine(**{"device_gib": 139, "host_gib": 125, **there}), config(rows=1), tokens)


def test_books_are_the_byte_table_of_long_rows_too() -> None:
    question = long_row(262144)
    chunked = [choice for choice in choices(question) if choice.mlp_chunk_tokens]
    assert {choice.host_inputs for choice in chunked} == set(range(29))
    for plan, _, least_s in books_beside_the_table(question, chunked[::41]):
        assert least_s <= question.seconds(plan).step


@pytest.mark.parametrize(
    ("layers", "host_gib", "most_s", "attention"), [(28, 125, 550, 0), (28, 176, 520, 10), (14, 125, 260, 14)]
)
def test_half_a_million_tokens_fit_and_keep_what_attention_gives(
    layers: int, host_gib: float, most_s: float, attention: int
) -> None:
    """176 GiB stand for what 8-bit formats leave of 125: 7 bytes a parameter, not 14. Without them inputs fill both places."""
    plan, found = search(long_row(layers=layers, host_gib=host_gib))
    assert found and plan.seconds is not None and plan.seconds.step <= most_s
    assert plan.mlp_chunk_tokens and plan.kept_attention >= attention and plan.num_rebuilt(layers) == layers


def test_short_rows_are_chunked_only_where_nothing_else_fits() -> None:
    """16 rows of 8,192 tokens: at 7 GiB an MLP sees whole rows, at 6 GiB it does not."""
    for device_gib, chunk in ((7, 0), (6, 1024)):
        question = problem(qwen("qwen2.5-7b"), specs(), machine(device_gib=device_gib), config(rows=16), 8192)
        plan, found = search(question)
        assert found and plan.mlp_chunk_tokens == chunk and plan.host_inputs == 28


@pytest.mark.parametrize(("rows", "row_tokens", "device_gib"), [(8, 65536, 120), (8, 65536, 20), (8, 16384, 8)])
def test_layers_that_are_to_turn_do_so_in_long_rows_too(rows: int, row_tokens: int, device_gib: float) -> None:
    """In chunks every layer would be computed again, which is looked at unasked for long rows, and where nothing else fits."""
    there = machine(device_gib=device_gib, host_gib=250)
    plan, found = search(problem(qwen("qwen2.5-7b"), specs(), there, config(rows=rows, turn_layers=4), row_tokens))
    assert found == (device_gib == 120)
    assert plan.turn_layers == 4 and plan.first_turning(28) == 24


def test_no_more_units_would_fit_at_home() -> None:
    question = ask(device_gib=60)
    books = Books(question)
    for choice in list(choices(question))[::53]:
        furnished, short = books.furnished(choice)
        if not short and furnished.home < len(question.model.units) - 1:
            assert books.device(furnished._replace(home=furnished.home + 1)) > 0.98 * 60 * 2**30


def test_updates_on_arrival_send_no_more_units_home_than_the_host_needs() -> None:
    """What gradients arrive in shrinks with every unit that leaves the host, the embedding's first. Oracle: every number."""
    model, given = qwen("qwen2.5-7b", 3), config(rows=1, update_on_arrival=True)
    question = problem(model, specs(), machine(device_gib=22.5, host_gib=10.4), given, 1024)
    books = Books(question)
    for choice in list(choices(question))[::20]:
        if not choice.richer_budget and books.furnished(choice)[1]:
            assert all(books.short(books._with(choice, home)) for home in range(len(model.units) + 1))


def test_layers_that_keep_more_fill_the_device_and_are_faster() -> None:
    """90 GiB, one wave: inputs alone are kept in 42 GiB, and a layer of 0.7 of its activations takes 12 GiB more."""
    question = ask(rows=128, device_gib=90)
    question = replace(question, pins=replace(question.pins, num_waves=1, micro_batch_rows=32))
    books, base = Books(question), _base(question)
    found = [
        books.furnished(choice)
        for choice in choices(question)
        if choice.activation_budget == 0.0 and choice.before_home and not choice.turns
    ]
    richer = [choice for choice, short in found if not short]
    assert richer and max(choice.richer_layers for choice in richer) == 3
    for choice in richer:
        assert books.device(choice._replace(home=0, richer_layers=choice.richer_layers + 1)) > 90 * 2**30
        leaner = choice._replace(richer_layers=0)
        assert question.seconds(choice.on(base)).compute < question.seconds(leaner.on(base)).compute


def test_what_is_said_to_be_measured_is_so_for_layers_that_turn_too() -> None:
    """Of the fastest plan's two budgets only that of most layers was measured: then none may turn."""
    question = ask(rows=128, device_gib=60)
    question = replace(question, pins=replace(question.pins, micro_batch_rows=32, num_waves=1, device_units=0, chunk_tokens=4096))
    plan, _ = search(question)
    own, free = plan.levels
    measured = {key_of(own): question.working(own)}
    found, fits = search(question.having(measured), keys=measured)
    assert fits and plan.turn_layers and not found.turn_layers and {key_of(level) for level in found.levels} == set(measured)
    measured[key_of(free)] = question.working(free)
    assert search(question.having(measured), keys=measured)[0].turn_layers


def test_every_choice_is_a_different_one() -> None:
    found = list(choices(ask(rows=12)))
    assert len(found) == len(set(found))


def test_eighty_layers_are_searched_in_seconds() -> None:
    """2 s of one core, minutes without the bounds; there is room for a slow machine that is busy with other tests."""
    question = problem(qwen("qwen2.5-7b", 80), specs(), machine(host_gib=400), config(rows=128), 1024)
    begin = time.process_time()
    plan, found = search(question)
    assert found and plan.seconds is not None and time.process_time() - begin < 20.0


def test_divisors_are_all_and_only_those() -> None:
    for number in (1, 2, 36, 97, 720):
        assert divisors(number) == [one for one in range(1, number + 1) if number % one == 0]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_ten_million_rows_have_few_choices(on_cpu: bool) -> None:
    """9,979,200 has 432 divisors, and is about as much as a configuration may ask for."""
    question = problem(qwen("qwen2.5-3b"), specs(), machine(cpu=on_cpu), config(rows=9_979_200), 8)
    begin = time.process_time()
    rows = sorted({choice.micro_batch_rows for choice in choices(question)})
    assert rows[0] == 1 and 8 < len(rows) <= MOST_ROW_CHOICES + 1
    assert time.process_time() - begin < 20.0


def test_a_million_rows_are_searched_in_seconds() -> None:
    """0.9 s of one core; ten million take 7 s, and 12 on a GPU."""
    question = problem(qwen("qwen2.5-3b"), specs(), machine(cpu=True), config(rows=1_000_000), 8)
    begin = time.process_time()
    plan, found = search(question)
    assert found and plan.rows_per_step == 1_000_000 and time.process_time() - begin < 20.0
