"""What a resumed run says of its plan, held against engines: plans of which it says nothing give the same bits."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

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


DENSE_FIRST: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the dense layer": {"on_device": (0, 1)},
    "one of experts too": {"on_device": (0, 1, 2)},
    "every layer": {"on_device": (0, 1, 2, 3)},
    "whole": {"expert_parts": 1, "on_device": (0, 1)},
}


@pytest.mark.parametrize("kind", ["experts", "dense first", "ends"])
def test_what_is_at_home_among_what_travels_in_parts_is_told(kind: str) -> None:
    sizes: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "head_dim": 8}
    sizes |= {"mlp_only_layers": [0]} if kind == "dense first" else {}
    plans = {"experts": PARTS, "dense first": DENSE_FIRST, "ends": ENDS}[kind]
    model = small_model() if kind == "ends" else small_model(model_type="qwen3_moe", layers=3, **sizes)
    base, runs, recorded = {"num_slots": 2, "num_slabs": 1, "expert_parts": 1 if kind == "ends" else 2}, {}, {}
    for name, changed in plans.items():
        engine = make_engine(model, Plan(**{**base, **changed}))
        recorded[name] = rounding_of(engine.plan, engine.store.units)
        runs[name] = clipped_steps(engine, 2)
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
        recorded[name] = rounding_of(plan, engine.store.units)
        runs[name] = clipped_steps(engine, 2)
    for one, other in product(PLANS, PLANS):
        (seen, left), (others_seen, others_left) = runs[one], runs[other]
        is_same = seen == others_seen and same(left, others_left)
        told = other_rounding(recorded[one], recorded[other])
        assert is_same or told is not None, f"{one}, {other}: other bits in silence"
        assert tied or is_same == (told is None), f"{one}, {other}: {told}"
    assert not any(same(runs["one wave"][1], runs[name][1]) for name in BF16)


WAVES = {"num_waves": 3, "resident_gradients": False, "first_wave": 2}
PARTED = {"end_parts": 1, "expert_parts": 3, "device_units": 0}


def units_of(num_layers: int, *, tied: bool = False) -> list[Any]:
    """All that is asked of units: ends, and layers of experts."""
    kinds = [False, *[True] * num_layers, *([] if tied else [False])]
    return [SimpleNamespace(index=index, is_layer=kind, tables=("a table",)) for index, kind in enumerate(kinds)]


def recorded(*, tied: bool = False, **changed: Any) -> dict[str, Any]:
    return rounding_of(Plan(**changed), units_of(4 + tied, tied=tied))


def pins_of(line: str) -> dict[str, Any]:
    """What it says is to be set, as a configuration would read it."""
    return dict(yaml.safe_load("{" + line.rpartition("to keep its bits set ")[2] + "}"))


def test_what_differs_is_told_with_everything_that_must_be_pinned() -> None:
    saved, home = recorded(), {"on_device": (0, 1, 2)}
    assert other_rounding(saved, recorded(num_slots=7, optimizer_threads=3, on_device=(0, 1))) is None
    assert other_rounding(recorded(num_waves=4, on_device=tuple(range(6))), recorded(on_device=tuple(range(6)))) is None
    waves, fp32 = recorded(num_waves=3, first_wave=2, on_device=(0,)), recorded(num_waves=3, fp32=True, tied=True)
    alone = {"micro_batch_rows": 1, "chunk_tokens": 4096, "mlp_chunk_tokens": 0, "carry_fp32": False, "compile": False}
    whole = {"end_parts": 1, "expert_parts": 1}
    for one, other, told, pins in (
        (saved, recorded(carry_fp32=True), "carry_fp32: False -> True", {**whole, "num_waves": 1}),
        (saved, recorded(num_waves=2), "num_waves: 1 -> 2", {**whole, "num_waves": 1}),
        (recorded(carry_fp32=True, num_waves=3), saved, "carry_fp32: True -> False", {**whole, "carry_fp32": True}),
        (
            recorded(num_waves=3, resident_gradients=True),
            recorded(num_waves=3),
            "num_waves: 1 -> 3",
            {**whole, "resident_gradients": True},
        ),
        (waves, saved, "num_waves: 3 -> 1", {**whole, **WAVES, "device_units": 1}),
        (waves, recorded(num_waves=3, first_wave=2), "device_units: 1 -> 0", {**whole, **WAVES, "device_units": 1}),
        (fp32, recorded(fp32=True, tied=True), "num_waves: 3 -> 1", {**whole, **WAVES, "first_wave": 0}),
        (recorded(expert_parts=3), recorded(**home), "expert_parts: 3 -> 1", {**PARTED, "num_waves": 1}),
        (recorded(expert_parts=3), recorded(expert_parts=3, **home), "device_units: 0 -> 3", {**PARTED, "num_waves": 1}),
        (
            recorded(**home),
            recorded(expert_parts=3, end_parts=4),
            "end_parts: 1 -> 4, expert_parts: 1 -> 3",
            {**whole, "num_waves": 1},
        ),
        (
            recorded(end_parts=4, **home),
            recorded(end_parts=4),
            "device_units: 3 -> 0",
            {"end_parts": 4, "expert_parts": 1, "device_units": 3, "num_waves": 1},
        ),
    ):
        line = other_rounding(one, other)
        assert line is not None and f"checkpoint: {told}: from here" in line, line
        assert pins_of(line) == {**alone, **pins}, line
    assert {*ALONE, *TOGETHER} <= {one.name for one in fields(Pins)}


@pytest.mark.parametrize("tied", [False, True])
def test_the_pins_are_enough_whatever_else_the_plan_has(tied: bool) -> None:
    """Of every pair of plans, and with the other one's fields where nothing is pinned."""
    plans = [{**PARTS[one], **ENDS[two], **PLANS[three]} for one, two, three in product(PARTS, ENDS, PLANS)]
    units, told = units_of(3, tied=tied), 0

    def record(fields: dict[str, Any]) -> dict[str, Any]:
        home = tuple(range(min(len(fields.get("on_device", ())), len(units))))  # as a planner has it: from the first on
        return rounding_of(Plan(**{"num_slots": 2, "expert_parts": 2, **fields, "on_device": home, "on_disk": ()}), units)

    for one, other in product(plans[::29], plans[::29]):
        line = other_rounding(record(one), record(other))
        if line is not None:
            told += 1
            pins = pins_of(line)
            if (home := pins.pop("device_units", None)) is not None:
                pins["on_device"] = tuple(range(home))
            assert other_rounding(record(one), record({**other, **pins})) is None, line
    assert told > 100


def test_what_an_older_checkpoint_has_not_recorded_is_not_compared() -> None:
    now = recorded(num_waves=2, on_device=(0, 1), expert_parts=4)
    assert other_rounding({}, now) is None
    before = {key: now[key] for key in (*ALONE, "end_parts", "expert_parts")}
    assert other_rounding(before, now) is None
    assert other_rounding({**before, "num_waves": 2, "resident_gradients": False, "device_units": 2}, now) is None
    for missing in now:  # of any age
        other_rounding({key: value for key, value in now.items() if key != missing}, recorded())
    longer = recorded(num_waves=2, first_wave=3)
    old = {**{key: longer[key] for key in before}, "num_waves": 2, "resident_gradients": False, "device_units": 0}
    assert "first_wave: 0 -> 3" in str(other_rounding(old, longer))
    line = other_rounding({**before, "num_waves": 1}, now)
    assert line is not None and line.endswith("num_waves: 1, end_parts: 1, expert_parts: 4")
