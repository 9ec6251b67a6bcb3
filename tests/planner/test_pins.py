"""What the user pins: kept alone and together, refused where no plan can keep it, named where it is in the way."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from layerferry.config import Pins
from layerferry.errors import PlanError
from layerferry.planner.choose import decide
from layerferry.planner.facts import Model
from layerferry.planner.problem import problem
from layerferry.planner.report import render
from tests.planner.subjects import config, machine, qwen, skeleton, specs
from tests.planner.test_choose import ask

PINS: dict[str, Any] = {
    "micro_batch_rows": 4,
    "num_waves": 2,
    "first_wave": 3,
    "activation_budget": 0.4,
    "richer_layers": 3,
    "richer_budget": 0.5,
    "turn_layers": 6,
    "host_inputs": 5,
    "mlp_chunk_tokens": 512,
    "kept_attention": 9,
    "device_units": 4,
    "resident_gradients": True,
    "carry_fp32": True,
    "chunk_tokens": 768,
    "num_slots": 5,
    "num_slabs": 3,
    "end_parts": 5,
    "compile": False,
    "optimizer_threads": 7,
}


def keeping() -> Model:
    """A 7B whose attention comes through our interface."""
    return replace(qwen("qwen2.5-7b"), attention_bytes=2 * 3584 + 4 * 28)


def test_every_pin_is_tried() -> None:
    """That of the disk in test_disk.py: it needs one; that of experts in test_search.py."""
    assert PINS.keys() | {"disk_units", "expert_parts"} == {field.name for field in fields(Pins)}


@pytest.mark.parametrize("name", PINS)
def test_what_is_pinned_stays(name: str) -> None:
    beside = {"richer_layers": 3} if name == "richer_budget" else {}  # without such layers it says nothing
    given = config(rows=16, **{name: PINS[name]}, **beside)
    assert getattr(decide(problem(keeping(), specs(), machine(), given, 1024)).plan, name) == PINS[name]


def test_pins_keep_each_other_company() -> None:
    """Several at once, also where the search would have taken another way: the planes all @host, rows long enough for chunks."""
    given = {"device_units": 0, "num_waves": 2, "carry_fp32": False, "resident_gradients": False, "richer_layers": 0}
    plan = decide(ask(config(rows=16, **given))).plan
    assert {name: getattr(plan, name) for name in given} == given
    long = config(rows=2, mlp_chunk_tokens=0, kept_attention=0, host_inputs=3, device_units=2)
    plan = decide(ask(long, 65536)).plan
    assert (plan.mlp_chunk_tokens, plan.kept_attention, plan.host_inputs, plan.on_device) == (0, 0, 3, (0, 1))
    chunked = config(rows=2, mlp_chunk_tokens=4096, kept_attention=5, host_inputs=28, activation_budget=0.3)
    plan = decide(problem(keeping(), specs(), machine(), chunked, 65536)).plan
    assert (plan.mlp_chunk_tokens, plan.kept_attention, plan.host_inputs, plan.activation_budget) == (4096, 5, 28, 0.3)
    assert decide(ask(config(rows=16, device_units=99))).plan.device_units == 30, "no more than there are"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device_units": 29, "disk_units": 2, "disk_memory": 1 << 40}, "device_units: 29 and disk_units: 2 are more than"),
        ({"resident_gradients": True, "carry_fp32": True}, "carry_fp32: true: with resident_gradients: true"),
        ({"richer_layers": 2, "mlp_chunk_tokens": 64}, "richer_layers: 2: with mlp_chunk_tokens every layer is computed again"),
        ({"turn_layers": 2, "kept_attention": 1}, "turn_layers: 2: with kept_attention every layer is computed again"),
        ({"turn_layers": 2, "end_parts": 4}, "turn_layers: 2: layers turn with a whole head, and end_parts: 4"),
        ({"turn_layers": 2, "expert_parts": 4}, "expert_parts: 4: qwen2: its layers have no stacked experts: expert_parts: 1"),
        ({"turn_layers": 2, "richer_layers": 3}, "turn_layers: 2 and richer_layers: 3 are both the last layers"),
        ({"richer_layers": 2, "kept_attention": 1}, "richer_layers: 2: with kept_attention every layer is computed again"),
        ({"first_wave": 3, "num_waves": 1}, "first_wave: 3: num_waves: 1 is the first and the last"),
        ({"update_on_arrival": True, "carry_fp32": True}, "carry_fp32: true: with update_on_arrival: true"),
        ({"update_on_arrival": True, "resident_gradients": False, "num_waves": 2}, "resident_gradients: false: with update_on"),
        (
            {"update_on_arrival": True, "resident_gradients": False, "first_wave": 2},
            "first_wave: 2: with update_on_arrival: true",
        ),
        ({"kept_attention": 2}, "kept_attention: 2: the attention of qwen2 does not come through our interface"),
    ],
)
def test_pins_that_contradict_each_other_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ask(config(rows=16, **given))


def test_units_pinned_to_a_device_that_has_no_room_are_named() -> None:
    shortfall = decide(ask(config(rows=16, device_units=20), device_gib=44)).shortfall
    assert shortfall is not None and re.search(r"device_units: \d+ instead of 20 fits", shortfall)


def test_gradient_checkpointing_off_keeps_everything() -> None:
    given = config(rows=16, train={"gradient_checkpointing": False})
    assert decide(ask(given)).plan.activation_budget == 1.0
    huge = config(rows=512, train={"gradient_checkpointing": False}, num_waves=1)
    assert decide(ask(huge)).shortfall is not None


def test_a_pinned_plan_that_cannot_fit_is_refused_with_the_pin_named() -> None:
    shortfall = decide(ask(config(rows=128, activation_budget=1.0, num_waves=1), device_gib=44)).shortfall
    assert shortfall is not None
    assert re.search(
        r"needs [\d.]+ GiB @device, 43\.1 GiB allowed by device_memory, 2% left for holes: [\d.]+ GiB short", shortfall
    )
    assert "activation_budget: 0.0 instead of 1.0 fits" in shortfall


@pytest.mark.parametrize(("num_slots", "units", "refused"), [(2, 0, True), (3, 0, False), (2, 27, False)])
def test_slots_that_are_too_few_for_layers_that_turn_are_refused_before_weights_are_read(
    num_slots: int, units: int, refused: bool
) -> None:
    """The prologue and 26 of 28 layers @device: the last two turn, and two slots do."""
    given = config(rows=16, turn_layers=2, num_slots=num_slots, device_units=units)
    if refused:
        with pytest.raises(PlanError, match="num_slots: 2: the 2 layers that turn hold one each"):
            decide(ask(given))
    else:
        assert decide(ask(given)).plan.turn_layers == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_waves": 99}, "num_waves: 99 is pinned; this model and step allow 16"),
        ({"num_waves": 2, "first_wave": 99}, "first_wave: 99 is pinned; this model and step allow 15"),
        ({"first_wave": 16}, "first_wave: 16 is pinned; this model and step allow 15"),
        ({"device_units": 99}, "device_units: 99 is pinned; this model and step allow 30"),
    ],
)
def test_a_pin_beyond_what_there_is_is_said(given: dict[str, Any], said: str) -> None:
    decision = decide(ask(config(rows=16, micro_batch_rows=1, **given)))
    assert said in decision.plan.notes
    name = said.partition(":")[0]
    table = render(decision.plan, decision.question)
    assert re.search(rf"^ *{name} .*planner", table, re.M) or name == "first_wave"


def test_a_first_wave_that_is_too_long_takes_no_waves_away() -> None:
    decision = decide(ask(config(rows=16, num_waves=2, first_wave=99)))
    assert decision.plan.num_waves == 2 and not any("num_waves" in note for note in decision.plan.notes)
    assert decision.plan.wave_sizes(16 // decision.plan.micro_batch_rows) == [15, 1]


def test_of_pins_that_are_kept_nothing_is_said() -> None:
    decision = decide(ask(config(rows=16, num_waves=2, micro_batch_rows=4)))
    assert not any("is pinned" in note for note in decision.plan.notes)


def test_parts_are_as_many_as_a_model_can_be_cut_into() -> None:
    """Eight experts in five parts are four of two; a thousand are eight. Ends likewise: of 96 rows, some must lie together."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = Model.of(skeleton("qwen3_moe", **sizes))
    for pinned, cut in ((2, 2), (5, 4), (1000, 8)):
        found = decide(problem(model, specs(), machine(), config(rows=2, expert_parts=pinned), 64)).plan
        said = f"expert_parts: {pinned} is pinned; this model and step allow {cut}"
        assert found.expert_parts == cut and (said in found.notes) == (pinned != cut)
    ends = decide(problem(model, specs(), machine(), config(rows=2, end_parts=5000), 64)).plan.end_parts
    assert 1 < ends <= 96
    beside = problem(model, specs(), machine(device_gib=0.001), config(rows=2, expert_parts=4), 64)
    assert decide(beside).plan.mlp_chunk_tokens == 0, "layers in parts are not chunked"
