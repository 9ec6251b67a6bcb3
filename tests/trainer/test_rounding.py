"""What a resumed run says of its plan, held against engines: plans of which it says nothing give the same bits."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from layerferry.config import Pins
from layerferry.plan import Plan
from layerferry.trainer.rounding import ALONE, TOGETHER, other_rounding, rounding_of
from tests.conformance.harness import make_engine
from tests.engine.small import clipped_steps, same, small_model

PLANS: dict[str, dict[str, Any]] = {
    "one wave": {},
    "buffers and places": {"num_slots": 5, "num_slabs": 2, "on_device": (1, 2), "on_disk": (3,), "optimizer_threads": 2},
    "summed @device": {"num_waves": 2, "resident_gradients": True},
    "summed @device, a longer first wave": {"num_waves": 2, "first_wave": 3, "resident_gradients": True},
    "bf16": {"num_waves": 2},
    "bf16, four waves": {"num_waves": 4},
    "bf16, a longer first wave": {"num_waves": 2, "first_wave": 3},
    "bf16, some units @device": {"num_waves": 2, "on_device": (0, 1)},
    "fp32": {"num_waves": 2, "carry_fp32": True},
    "fp32 in one wave": {"carry_fp32": True},
    "fp32 in one wave, some units @device": {"carry_fp32": True, "on_device": (0, 1)},
    "fp32, some units @device": {"num_waves": 2, "carry_fp32": True, "on_device": (0, 1, 2)},
    "fp32, every unit @device": {"num_waves": 2, "carry_fp32": True, "on_device": (0, 1, 2, 3, 4)},
    "every unit @device": {"on_device": (0, 1, 2, 3, 4)},
}
BF16 = [name for name in PLANS if name.startswith("bf16")]


PARTS: dict[str, dict[str, Any]] = {
    "parts": {},
    "parts, buffers": {"num_slots": 4, "num_slabs": 2},
    "parts, summed @device": {"num_waves": 2, "resident_gradients": True},
    "parts, the embedding @device": {"on_device": (0,)},
    "parts, a layer @device": {"on_device": (0, 1)},
    "parts, a layer @device, summed there": {"on_device": (0, 1), "num_waves": 2, "resident_gradients": True},
    "parts, two layers @device": {"on_device": (0, 1, 2)},
    "bf16, parts": {"num_waves": 2},
    "bf16, parts, the embedding @device": {"on_device": (0,), "num_waves": 2},
    "parts, fp32, a layer @device": {"on_device": (0, 1), "carry_fp32": True},
    "parts, every layer @device": {"on_device": (0, 1, 2, 3)},
    "no parts": {"expert_parts": 1},
}
ENDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole, every unit @device": {"on_device": (0, 1, 2, 3, 4)},
    "ends": {"end_parts": 3},
    "ends, waves summed @device": {"end_parts": 3, "num_waves": 2, "resident_gradients": True},
    "ends, the embedding @device": {"end_parts": 3, "on_device": (0,)},
    "ends, some layers @device too": {"end_parts": 3, "on_device": (0, 1, 2)},
    "ends, every unit @device": {"end_parts": 3, "on_device": (0, 1, 2, 3, 4)},
    "two parts": {"end_parts": 2},
    "bf16, ends": {"end_parts": 3, "num_waves": 2},
    "bf16, ends, the embedding @device": {"end_parts": 3, "num_waves": 2, "on_device": (0,)},
    "fp32, ends, the embedding @device": {"end_parts": 3, "carry_fp32": True, "on_device": (0,)},
}


@pytest.mark.parametrize("kind", ["experts", "ends"])
def test_what_is_at_home_among_what_travels_in_parts_is_told(kind: str) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "head_dim": 8}
    plans = {"experts": PARTS, "ends": ENDS}[kind]
    model = small_model(model_type="qwen3_moe", layers=3, **sizes) if kind == "experts" else small_model()
    base, runs, recorded = {"num_slots": 2, "num_slabs": 1, "expert_parts": 2 if kind == "experts" else 1}, {}, {}
    for name, changed in plans.items():
        plan = Plan(**{**base, **changed})
        runs[name], recorded[name] = clipped_steps(make_engine(model, plan), 2), rounding_of(plan, tied=False, num_units=5)
    for one, other in product(plans, plans):
        (seen, left), (others_seen, others_left) = runs[one], runs[other]
        told = other_rounding(recorded[one], recorded[other])
        assert (seen == others_seen and same(left, others_left)) == (told is None), f"{one}, {other}: {told}"


@pytest.mark.parametrize("tied", [False, True])
def test_nothing_is_said_of_plans_with_the_same_bits_alone(tied: bool) -> None:
    """Of every pair. Plans of which something is said may come out alike all the same; untied, they do not here."""
    model, runs, recorded = small_model(tie_word_embeddings=tied), {}, {}
    for name, changed in PLANS.items():
        places = {key: tuple(unit for unit in changed.get(key, ()) if unit < 5 - tied) for key in ("on_device", "on_disk")}
        plan = Plan(**{"num_slots": 2, "num_slabs": 1, **changed, **places})
        engine = make_engine(model, plan)
        assert engine.has_tied_ends == tied
        recorded[name] = rounding_of(plan, tied=tied, num_units=len(engine.skeleton.units))
        runs[name] = clipped_steps(engine, 2)
    for one, other in product(PLANS, PLANS):
        (seen, left), (others_seen, others_left) = runs[one], runs[other]
        is_same = seen == others_seen and same(left, others_left)
        told = other_rounding(recorded[one], recorded[other])
        assert is_same or told is not None, f"{one}, {other}: other bits in silence"
        assert tied or is_same == (told is None), f"{one}, {other}: {told}"
    assert not any(same(runs["one wave"][1], runs[name][1]) for name in BF16)


def recorded(*, tied: bool = False, **changed: Any) -> dict[str, Any]:
    return rounding_of(Plan(**changed), tied=tied, num_units=6)


def test_what_differs_is_told_and_can_be_pinned() -> None:
    saved, home = recorded(), {"on_device": (0, 1, 2)}
    assert other_rounding(saved, recorded(num_slots=7, optimizer_threads=3, on_device=(0, 1))) is None
    waves = recorded(num_waves=3, first_wave=2, on_device=(0,))
    for one, other, told, pins in (
        (saved, recorded(carry_fp32=True), "carry_fp32: False -> True", "carry_fp32: false"),
        (saved, recorded(num_waves=2), "num_waves: 1 -> 2", "num_waves: 1"),
        (waves, saved, "num_waves: 3 -> 1", "num_waves: 3, resident_gradients: false, first_wave: 2, device_units: 1"),
        (waves, recorded(num_waves=3, first_wave=2), "device_units: 1 -> 0", ", device_units: 1"),
        (
            recorded(num_waves=3, fp32=True, tied=True),
            recorded(fp32=True, tied=True),
            "num_waves: 3 -> 1",
            "num_waves: 3, resident_gradients: false, first_wave: 0",
        ),
        (recorded(expert_parts=3), recorded(**home), "expert_parts: 3 -> 1", "expert_parts: 3, device_units: 0"),
        (
            recorded(expert_parts=3),
            recorded(expert_parts=3, **home),
            "device_units: 0 -> 3",
            "set expert_parts: 3, device_units: 0",
        ),
        (recorded(**home), recorded(expert_parts=3, end_parts=4), "end_parts: 1 -> 4, expert_parts: 1 -> 3", "expert_parts: 1"),
        (recorded(end_parts=4, **home), recorded(end_parts=4), "device_units: 3 -> 0", "set end_parts: 4, device_units: 3"),
    ):
        line = other_rounding(one, other)
        assert line is not None and f"checkpoint: {told}: from here" in line and line.endswith(pins), line
    assert {*ALONE, *TOGETHER} <= {one.name for one in fields(Pins)}


def test_what_an_older_checkpoint_has_not_recorded_is_not_compared() -> None:
    now = recorded(num_waves=2, on_device=(0, 1), expert_parts=4)
    assert other_rounding({}, now) is None
    before = {key: now[key] for key in (*ALONE, "end_parts", "expert_parts")}
    assert other_rounding(before, now) is None
    assert other_rounding({**before, "num_waves": 2, "resident_gradients": False, "device_units": 2}, now) is None
    line = other_rounding({**before, "num_waves": 1}, now)
    assert line is not None and line.endswith("keep its bits set num_waves: 1")
