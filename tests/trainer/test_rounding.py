"""What a resumed run says of its plan, held against engines: plans of which it says nothing give the same bits."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from layerferry.config import Pins
from layerferry.plan import Plan
from layerferry.trainer.rounding import ROUNDING, WAVES, other_rounding, rounding_of
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
}


def test_layers_at_home_among_layers_in_parts_are_told() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "head_dim": 8}
    model, runs, recorded = small_model(model_type="qwen3_moe", layers=3, **sizes), {}, {}
    for name, changed in PARTS.items():
        plan = Plan(**{"num_slots": 2, "num_slabs": 1, "expert_parts": 2, **changed})
        runs[name], recorded[name] = clipped_steps(make_engine(model, plan), 2), rounding_of(plan, tied=False)
    for one, other in product(PARTS, PARTS):
        (seen, left), (others_seen, others_left) = runs[one], runs[other]
        told = other_rounding(recorded[one], recorded[other])
        assert (seen == others_seen and same(left, others_left)) == (told is None), f"{one}, {other}: {told}"
    assert "device_units: 0 -> 2" in str(other_rounding(recorded["parts"], recorded["parts, a layer @device"]))


@pytest.mark.parametrize("tied", [False, True])
def test_nothing_is_said_of_plans_with_the_same_bits_alone(tied: bool) -> None:
    """Of every pair. Plans of which something is said may come out alike all the same; untied, they do not here."""
    model, runs, recorded = small_model(tie_word_embeddings=tied), {}, {}
    for name, changed in PLANS.items():
        places = {key: tuple(unit for unit in changed.get(key, ()) if unit < 5 - tied) for key in ("on_device", "on_disk")}
        plan = Plan(**{"num_slots": 2, "num_slabs": 1, **changed, **places})
        engine = make_engine(model, plan)
        assert engine.has_tied_ends == tied
        runs[name], recorded[name] = clipped_steps(engine, 2), rounding_of(plan, tied=tied)
    for one, other in product(PLANS, PLANS):
        (seen, left), (others_seen, others_left) = runs[one], runs[other]
        is_same = seen == others_seen and same(left, others_left)
        told = other_rounding(recorded[one], recorded[other])
        assert is_same or told is not None, f"{one}, {other}: other bits in silence"
        assert tied or is_same == (told is None), f"{one}, {other}: {told}"
    assert not any(same(runs["one wave"][1], runs[name][1]) for name in BF16)


def test_what_differs_is_told_and_can_be_pinned() -> None:
    saved = rounding_of(Plan(), tied=False)
    assert other_rounding(saved, rounding_of(Plan(num_slots=7, optimizer_threads=3), tied=False)) is None
    for told, pinned in {
        other_rounding(saved, rounding_of(Plan(carry_fp32=True), tied=False)): "carry_fp32: false",
        other_rounding(saved, rounding_of(Plan(num_waves=2), tied=False)): "num_waves: 1",
        other_rounding(rounding_of(Plan(num_waves=3, first_wave=2, on_device=(0,)), tied=False), saved): (
            "num_waves: 3, first_wave: 2, resident_gradients: false, device_units: 1"
        ),
        other_rounding(rounding_of(Plan(num_waves=3, fp32=True), tied=True), rounding_of(Plan(fp32=True), tied=True)): (
            "num_waves: 3, resident_gradients: false"
        ),
    }.items():
        assert told is not None and told.endswith(f"to keep its bits set {pinned}")
    assert {*ROUNDING, *WAVES} <= {one.name for one in fields(Pins)}


def test_what_an_older_checkpoint_has_not_recorded_is_not_compared() -> None:
    now = rounding_of(Plan(num_waves=2), tied=False)
    assert other_rounding({}, now) is None
    assert other_rounding({key: now[key] for key in ROUNDING}, now) is None
