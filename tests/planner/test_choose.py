"""What is chosen, what is kept as pinned, what is refused and with which words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from layerferry.config import Config, DataConfig, ModelConfig
from layerferry.errors import PlanError
from layerferry.layout import PlaneSpec
from layerferry.optim.adamw import AdamW
from layerferry.optim.formats import StateFormat
from layerferry.optim.lion import Lion
from layerferry.plan import Plan
from layerferry.planner.choose import MOST_MEASUREMENTS, Decision, choose, decide, pinned_bytes, with_notes
from layerferry.planner.compute import layer_paces, pace
from layerferry.planner.estimate import estimate
from layerferry.planner.facts import Kept, Model
from layerferry.planner.flops import Flops
from layerferry.planner.held import DEVICE, HOST
from layerferry.planner.machine import Machine
from layerferry.planner.problem import Problem, fits, needs, problem
from layerferry.planner.search import INEXACT, search
from layerferry.planner.working import Shape, Working
from layerferry.store.store import plane_specs
from tests.planner.subjects import GIB, QWEN_7B, config, machine, qwen, skeleton, specs

FEW: dict[str, Any] = {"chunk_tokens": 4096, "num_slots": 3, "num_slabs": 2}
"""Pins that leave a search a thirtieth of its choices, where a test is about something else."""
FREE_GIB = 0.98 * 139
"""What a run may use of an H200."""


def ask(given: Config | None = None, row_tokens: int = 1024, *, name: str = "qwen2.5-7b", **there: Any) -> Problem:
    return problem(qwen(name), specs(), machine(**there), given or config(rows=128), row_tokens)


_DECISIONS: dict[str, Decision] = {}


def decided(given: Config | None = None, row_tokens: int = 1024, **there: Any) -> Decision:
    """What is decided without measurements; of questions that several tests ask, once."""
    given = given or config(rows=128)
    asked = repr((given, row_tokens, sorted(there.items())))
    if asked not in _DECISIONS:
        _DECISIONS[asked] = decide(ask(given, row_tokens, **there))
    return _DECISIONS[asked]


def gib(plan: Plan, place: str) -> float:
    return plan.total(place) / GIB


# ---------------------------------------------------------------- what is chosen


def step_s(plan: Plan) -> float:
    assert plan.seconds is not None
    return plan.seconds.step


def test_a_whole_h200_is_used_and_is_no_slower_than_the_plan_made_by_hand() -> None:
    """By hand, measured: 16 units at home, 8 waves of 16 rows, budget 0.7, resident gradients: 9.684 s."""
    decision = decided(device_gib=FREE_GIB)
    plan = decision.plan
    assert decision.shortfall is None and plan.compile
    assert step_s(plan) <= 9.9
    assert plan.on_device == tuple(range(len(plan.on_device))) and len(plan.on_device) >= 16
    assert gib(plan, DEVICE) <= FREE_GIB


@pytest.mark.parametrize(
    ("name", "rows", "device_gib", "most_s"),
    [
        ("qwen2.5-3b", 128, FREE_GIB, 4.6),
        ("qwen2.5-7b", 128, 44, 11.3),
        ("qwen2.5-7b", 16, FREE_GIB, 1.57),
        ("qwen2.5-7b", 128, 24, 12.0),
        ("qwen2.5-7b", 128, 10, 14.0),
    ],
)
def test_what_an_h200_should_reach(name: str, rows: int, device_gib: float, most_s: float) -> None:
    decision = decided(config(rows=rows), name=name, device_gib=device_gib)
    assert decision.shortfall is None and step_s(decision.plan) <= most_s


def test_the_limit_of_the_step_is_said() -> None:
    notes = " ".join(decided(device_gib=10).plan.notes)
    assert "% compute" in notes and "waits for updates" in notes


def test_a_limit_of_locked_memory_is_spoken_of_where_more_is_to_be_pinned() -> None:
    """bf16 weights and gradients of everything that travels: 4 bytes a parameter."""
    plan = decided(device_gib=44).plan
    pinned = pinned_bytes(ask(device_gib=44), plan)
    assert pinned == pytest.approx(4 * qwen("qwen2.5-7b").num_params, rel=0.001)
    for limit, said in ((None, False), (pinned, False), (pinned - 1, True)):
        notes = " ".join(with_notes(ask(device_gib=44, locked_limit=limit), plan).notes)
        assert ("RLIMIT_MEMLOCK" in notes) is said


def test_45_gib_stream_everything_in_one_wave() -> None:
    """DESIGN's probe: budget 0.0, 131k tokens a step, 41 GiB; and what estimates and the allocator's holes want besides."""
    plan = decided(device_gib=45).plan
    assert (plan.num_waves, plan.activation_budget, plan.num_slots, plan.on_device) == (1, 0.0, 3, ())
    assert gib(plan, DEVICE) == pytest.approx(41, rel=0.05)
    assert gib(plan, HOST) * GIB / qwen("qwen2.5-7b").num_params == pytest.approx(14.0, abs=0.01)


def test_a_small_device_takes_several_waves_and_ends_in_parts() -> None:
    """Whole ends alone would take more than five of ten GiB: 31 s a step, more than twice as much."""
    plan, whole = (decided(config(rows=128, end_parts=parts, host_inputs=0), device_gib=10).plan for parts in (None, 1))
    assert plan.num_waves > 1 and plan.end_parts > 1 and gib(plan, DEVICE) <= 10
    assert step_s(plan) < 14.5 and step_s(whole) > 2 * step_s(plan)


def test_parts_are_taken_where_they_buy_more_than_they_cost() -> None:
    """Logits are computed twice: a device with room for whole ends keeps them whole."""
    assert decided(device_gib=44).plan.end_parts == 1
    assert decided(device_gib=FREE_GIB).plan.end_parts == 1


def test_parts_of_tied_ends_are_refused() -> None:
    with pytest.raises(PlanError, match="end_parts: 4: qwen2: embedding and head share a weight"):
        problem(qwen("qwen2.5-3b"), specs(), machine(), config(end_parts=4), 1024)
    small = decided(name="qwen2.5-3b", device_gib=10).plan
    assert small.end_parts == 1


def test_a_budget_that_holds_no_part_is_refused_with_the_least_that_does() -> None:
    shortfall = decided(device_gib=2).shortfall
    assert shortfall is not None
    least = float(re.search(r"device_memory: ([\d.]+) GiB is the least that is enough", shortfall)[1])  # type: ignore[index]
    assert 2 < least < 5
    plan = decided(device_gib=least + 0.01).plan
    assert plan.end_parts > 1 and gib(plan, DEVICE) <= least + 0.01
    assert not search(ask(device_gib=0.9 * least))[1]


@pytest.mark.parametrize("cpu", [False, True])
def test_a_host_budget_is_refused_with_one_that_fits(cpu: bool) -> None:
    def asked(host_gib: float) -> str | None:
        there = machine(device_gib=8, host_gib=host_gib, cpu=cpu, **({"device_source": "host_memory"} if cpu else {}))
        return decide(problem(qwen("qwen2.5-3b"), specs(), there, config(rows=1), 128)).shortfall

    shortfall = asked(30.0)
    assert shortfall is not None
    enough = float(re.search(r"host_memory: ([\d.]+) GiB fits", shortfall)[1])  # type: ignore[index]
    assert enough > 30.0 and asked(enough + 0.005) is None


@pytest.mark.parametrize("device_gib", [10, 24])
def test_a_small_device_keeps_inputs_at_the_host_in_one_wave(device_gib: float) -> None:
    """128 rows of 1024 tokens have inputs of 24.5 GiB beside 99.3 GiB of planes."""
    plan, without = (decided(config(rows=128, host_inputs=n), device_gib=device_gib).plan for n in (None, 0))
    assert plan.num_waves == 1 and plan.host_inputs > 0 and gib(plan, DEVICE) <= device_gib and gib(plan, HOST) <= 126
    assert step_s(plan) < {10: 0.97, 24: 1.0}[device_gib] * step_s(without)
    tight = decided(config(rows=128), device_gib=device_gib, host_gib=110).plan
    assert gib(tight, HOST) <= 110 and step_s(plan) <= INEXACT * step_s(tight)


def test_who_says_what_is_kept_gets_it_kept_on_the_device() -> None:
    """A pinned budget is a wish for activations that stay; a pinned number of inputs @host is another wish."""
    pinned = decided(config(rows=128, activation_budget=0.3), device_gib=24).plan
    assert (pinned.activation_budget, pinned.host_inputs) == (0.3, 0)
    both = decided(config(rows=128, activation_budget=0.0, host_inputs=14), device_gib=30).plan
    assert (both.activation_budget, both.host_inputs) == (0.0, 14)
    assert decided(config(rows=4, host_inputs=99)).plan.host_inputs == 28


def test_waves_carry_exactly_where_the_host_has_room() -> None:
    given = config(rows=128, host_inputs=0, **FEW)
    assert decided(given, device_gib=30, host_gib=126).plan.carry_fp32
    tight = decided(given, device_gib=30, host_gib=100).plan
    assert not tight.carry_fp32 and "one rounding a wave" in " ".join(tight.notes)


def test_what_the_host_has_no_room_for_lives_on_the_device() -> None:
    decision = decided(config(rows=32), host_gib=60, device_gib=139)
    assert decision.shortfall is None and gib(decision.plan, HOST) <= 60 and len(decision.plan.on_device) >= 10


def test_a_cpu_is_eager_and_takes_the_users_rows() -> None:
    decision = decided(config(rows=4, accumulation=3), cpu=True, host_gib=180, row_tokens=128)
    plan = decision.plan
    assert (plan.compile, plan.activation_budget, plan.micro_batch_rows, plan.rows_per_step) == (False, 1.0, 4, 12)
    assert plan.optimizer_threads == 14 and not plan.on_device


def test_a_cpu_has_one_memory_for_both_places() -> None:
    question = ask(config(rows=4), cpu=True, host_gib=180, row_tokens=128)
    plan = decide(question).plan
    (needed, there), *others = needs(plan, question.machine).values()
    assert needed >= plan.total(HOST) + plan.total(DEVICE) and there == 180 * GIB and not others


def test_rows_are_padded_to_the_loaders_multiple() -> None:
    assert ask(row_tokens=1001).shape.row_tokens == 1008


@pytest.mark.parametrize("cpu", [False, True])
def test_a_host_memory_above_what_is_free_is_kept_and_said(cpu: bool) -> None:
    """Some virtual machines have more than they say; on the others the system would end the run without a word."""
    asked = machine(device_gib=44, host_gib=300, cpu=cpu, host_free=20 * GIB)
    plan = decide(problem(qwen("qwen2.5-7b"), specs(), asked, config(rows=16), 1024)).plan
    note = next(note for note in plan.notes if "host_memory" in note)
    said = re.search(r"host_memory: 300\.0 GiB, but 20\.0 GiB are free now, and this plan takes ([\d.]+) GiB", note)
    assert said is not None and float(said[1]) == pytest.approx(needs(plan, asked)[HOST][0] / GIB, abs=0.06)
    enough = replace(asked, host_free=300 * GIB)
    assert not any(
        "host_memory" in note for note in decide(problem(qwen("qwen2.5-7b"), specs(), enough, config(), 1024)).plan.notes
    )


def test_packing_and_isolation_reach_the_shape() -> None:
    packed = replace(config(), data=DataConfig(neat_packing=True))
    assert ask(packed).shape == Shape(row_tokens=1024, rows_per_step=8, isolated=True, packed=True, fused_head=True)


# ---------------------------------------------------------------- what is refused


def test_a_budget_below_one_slot_is_refused() -> None:
    shortfall = decided(config(**FEW), device_gib=0.2).shortfall
    assert shortfall is not None and "one layer's slot alone takes 0.43 GiB" in shortfall


def test_a_host_that_is_too_small_is_refused_with_the_model_that_fits() -> None:
    there = machine(device_gib=20, host_gib=40, host_source="MemAvailable")
    shortfall = decide(problem(qwen("qwen2.5-7b"), specs(), there, config(**FEW), 1024)).shortfall
    assert shortfall is not None and "GiB short" in shortfall
    assert "a model of" in shortfall and "this one has 7.62B" in shortfall
    assert "host_memory: states another limit than MemAvailable" in shortfall
    there = replace(there, host_source="RLIMIT_AS")
    shortfall = decide(problem(qwen("qwen2.5-7b"), specs(), there, config(**FEW), 1024)).shortfall
    assert shortfall is not None and shortfall.endswith("; `ulimit -v unlimited` lifts RLIMIT_AS")


def test_a_host_that_is_too_small_names_the_format_that_fits() -> None:
    lean = plane_specs(AdamW(state_format=StateFormat(master="24bit", moments="8bit")).state_planes)

    def asked(planes: dict[str, PlaneSpec], host_gib: int) -> str | None:
        there = machine(device_gib=20, host_gib=host_gib)
        return decide(problem(qwen("qwen2.5-7b"), planes, there, config(**FEW), 1024)).shortfall

    shortfall = asked(specs(), 70)
    assert shortfall is not None and re.search(r"optim: adamw_8bit fits \([\d.]+ GiB @host", shortfall)
    assert asked(lean, 70) is None
    tiny = asked(lean, 30)
    assert tiny is not None and "adamw_8bit" not in tiny, "what is not enough is not offered"


def test_a_formats_update_has_its_own_rate() -> None:
    """Measured for two formats; the others by the bytes that they move: Lion 18 of AdamW's 26, 24 bits over fp32 moments 24."""
    there = machine()
    for optimizer, expected in [
        (AdamW(), there.optimizer_s_per_param.value),
        (AdamW(state_format=StateFormat(master="24bit", moments="8bit")), there.coded_optimizer_s_per_param.value),
        (Lion(), there.optimizer_s_per_param.value * 18 / 26),
        (AdamW(state_format=StateFormat(master="24bit")), there.optimizer_s_per_param.value * 24 / 26),
    ]:
        asked = problem(qwen("qwen2.5-7b"), plane_specs(optimizer.state_planes), there, config(), 1024)
        assert asked.machine.optimizer_s_per_param.value == pytest.approx(expected)


def test_longer_rows_than_fit_name_the_length_that_does() -> None:
    shortfall = decided(config(rows=1), row_tokens=262144, device_gib=16).shortfall
    assert shortfall is not None
    length = int(re.search(r"cutoff_len: (\d+) fits", shortfall)[1])  # type: ignore[index]
    assert decided(config(rows=1), row_tokens=length, device_gib=16).shortfall is None


def test_choose_raises_the_shortfall() -> None:
    tiny = skeleton("llama")
    with pytest.raises(PlanError, match=r"needs .* KiB @host, .* short") as caught:
        choose(tiny, specs(), machine(host_gib=1e-4, device_gib=1e-4), config(), 64)
    assert caught.value.exit_code == 3
    assert choose(tiny, specs(), machine(), config(), 64).rows_per_step == 8


# ---------------------------------------------------------------- calibration in the loop


def test_measured_bytes_replace_the_estimate_and_measurements_are_few() -> None:
    asked: list[tuple[float, int, int]] = []

    def measure(plan: Plan, shape: Shape) -> Working | None:
        asked.append((plan.activation_budget, plan.micro_batch_rows, plan.chunk_tokens))
        guess = estimate(qwen("qwen2.5-7b"), plan, shape)
        layers = tuple(replace(layer, kept=3 * layer.kept) for layer in guess.layers)
        return replace(guess, layers=layers, measured=True)

    question = ask(device_gib=60, given=config(rows=64, num_slots=3, num_slabs=2))
    without, decision = decide(question), decide(question, measure)
    assert len(set(asked)) == len(asked), "a level is measured once"
    assert 1 <= len({(rows, chunk) for _, rows, chunk in asked}) <= MOST_MEASUREMENTS
    assert decision.plan.calibrated and all(item.exact for item in decision.plan.items)
    assert gib(decision.plan, DEVICE) <= 60
    assert step_s(decision.plan) > step_s(without.plan), "three times as much does not fit where the estimate did"


@pytest.mark.parametrize(("slower", "believed"), [(2.0, True), (0.6, True), (1.1, False), (0.9, False)])
def test_layers_that_take_quite_another_time_than_expected_are_believed(slower: float, believed: bool) -> None:
    question = ask(device_gib=60, given=config(rows=64, micro_batch_rows=16))

    def measure(plan: Plan, shape: Shape) -> Working | None:
        timed = pace(question.model, plan, shape, question.machine).layers
        layer_s = tuple((0.9 * slower * up, 1.05 * slower * down) for up, down in timed)
        return replace(estimate(question.model, plan, shape), layer_s=layer_s, measured=True)

    decision = decide(question, measure)
    plan, expected = decision.plan, question.seconds(decision.plan)
    assert plan.seconds == decision.question.seconds(plan), "who asks on compares with the same seconds"
    [(up, down), *_] = pace(question.model, plan, question.shape, question.machine).layers
    seen = (0.9 * up + 1.05 * down) / (up + down) * slower if believed else 1.0
    assert plan.seconds is not None
    layers = 4 * sum(map(sum, layer_paces(question.model, plan, question.shape, question.machine)))
    assert plan.seconds.compute == pytest.approx(expected.compute + (seen - 1) * layers, rel=0.01)
    assert any("layers were timed" in note for note in plan.notes) is believed


@pytest.mark.parametrize(
    ("slowness", "said"), [((1.0, 0.6), "0.60 to 1.00 times"), ((1.7, 1.7), ": 1.70 times"), ((1.0, 1.0), "")]
)
def test_layers_that_are_faster_are_said_to_be(slowness: tuple[float, ...], said: str) -> None:
    question = ask()
    question = replace(question, model=replace(question.model, slowness=slowness))
    notes = " ".join(with_notes(question, Plan()).notes)
    assert said in notes and ("layers were timed" in notes) == bool(said)


def test_where_nothing_can_be_measured_the_estimate_stands() -> None:
    decision = decide(ask(), lambda plan, shape: None)
    assert not decision.plan.calibrated and "estimated, not measured" in " ".join(decision.plan.notes)


# ---------------------------------------------------------------- properties

BUDGETS = st.floats(min_value=9.0, max_value=200.0)


@settings(max_examples=5, deadline=None)
@given(small=BUDGETS, extra=st.floats(min_value=0.0, max_value=100.0), rows=st.sampled_from([1, 8, 24]))
def test_more_device_memory_never_gives_a_worse_plan(small: float, extra: float, rows: int) -> None:
    less, more = (decided(config(rows=rows, **FEW), device_gib=g) for g in (small, small + extra))
    if less.shortfall is None:
        assert more.shortfall is None
        worst = 1.0 if less.plan.is_exact else INEXACT
        assert step_s(more.plan) <= 1.01 * worst * step_s(less.plan), "a unit more at home may cost its update @device"


@settings(max_examples=6, deadline=None)
@given(device=BUDGETS, host=st.floats(min_value=90.0, max_value=300.0), rows=st.integers(1, 64), tokens=st.integers(1, 4096))
@example(device=90.0, host=102.79644405592163, rows=61, tokens=882)  # fewer layers turn than do in as many slots as travel
def test_what_is_chosen_fits_and_covers_the_step(device: float, host: float, rows: int, tokens: int) -> None:
    question = ask(config(rows=rows), row_tokens=tokens, device_gib=device, host_gib=host)
    decision = decide(question)
    plan = decision.plan
    assert (decision.shortfall is None) == fits(question, plan)
    assert 1 <= plan.micro_batch_rows <= rows and rows % plan.micro_batch_rows == 0
    assert plan.num_waves <= rows // plan.micro_batch_rows


def test_a_model_without_a_linear_head_or_attention_can_be_planned() -> None:
    bare = replace(
        qwen("qwen2.5-7b"),
        has_linear_head=False,
        flops=Flops(layer_params=1, head_params=1, attention=()),
        kept=(Kept(eager=1.0, square=0.0, compiled=1.0, largest=1.0),),
    )
    question = problem(bare, specs(), machine(), Config(model=ModelConfig(model_name_or_path="x")), 64)
    assert decide(question).shortfall is None


def test_one_memory_for_both_places_is_counted_once() -> None:
    """A described machine whose device computes in the host's 30 GiB: what planes and device need must fit together."""
    model = Model.of(skeleton("qwen2", **{**QWEN_7B, "num_hidden_layers": 3}))
    separate = machine(device_gib=30.0, host_gib=30.0)
    shared = replace(separate, unified=True, device_source="free now")

    def decision(there: Machine, **pins: Any) -> Any:
        return decide(problem(model, specs(), there, config(rows=8, **pins), 512))

    fits = decision(shared)
    assert fits.shortfall is None
    assert fits.plan.total(HOST) + fits.plan.total(DEVICE) <= 30 * GIB
    assert list(needs(fits.plan, shared)) == [HOST]
    planes = fits.plan.total(HOST)
    tight = replace(shared, host_available=planes + (1 << 28))
    assert decision(replace(separate, host_available=planes + (1 << 28))).shortfall is None
    assert "short" in (decision(tight).shortfall or "")
