"""Parts of a unit: every byte of every plane in exactly one of them, where its own layout says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layerferry.layout import FP32_PLANE, GRAD_PLANE, RESIDUE_PLANE, WEIGHT_PLANE, Layout, ParameterSpec, Plane, PlaneSpec
from layerferry.units import Kind, Part, Unit, divide

SPECS = (WEIGHT_PLANE, RESIDUE_PLANE, GRAD_PLANE, FP32_PLANE)
BF16, FP32 = torch.bfloat16, torch.float32


def unit_of(*parameters: tuple[str, tuple[int, ...], torch.dtype, bool], tables: tuple[str, ...]) -> Unit:
    specs = [ParameterSpec(name=name, shape=shape, dtype=dtype, decays=decays) for name, shape, dtype, decays in parameters]
    layout = Layout.of(specs)
    return Unit(name="end", index=0, layout=layout, names={s.name: s.name for s in specs}, is_layer=False, tables=tables)


UNITS = {
    "a table": unit_of(("table", (96, 32), BF16, True), tables=("table",)),
    "rows that are no whole alignment": unit_of(("table", (97, 24), BF16, True), tables=("table",)),
    "a norm behind": unit_of(("table", (96, 32), BF16, True), ("norm", (32,), BF16, False), tables=("table",)),
    "fp32": unit_of(("norm", (32,), FP32, False), ("table", (50, 40), FP32, True), tables=("table",)),
    "two sections": unit_of(
        ("gate", (5, 7), FP32, True), ("table", (96, 32), BF16, True), ("norm", (3,), BF16, False), tables=("table",)
    ),
    "a bias": unit_of(("table", (384, 8), BF16, True), ("bias", (384,), BF16, False), tables=("table", "bias")),
    "two tables": unit_of(("long", (96, 16), BF16, True), ("short", (20, 32), BF16, True), tables=("long", "short")),
}


LAYERS = {
    "experts between others": unit_of(
        ("query", (5, 24), BF16, True), ("up", (16, 8, 24), BF16, True), ("norm", (24,), BF16, False), tables=("up",)
    ),
    "experts with biases and an fp32 router": unit_of(
        ("router", (32, 24), FP32, True),
        *(("up", (32, 16, 8), BF16, True), ("bias", (32, 16), BF16, False), ("norm", (24,), BF16, False)),
        tables=("up", "bias"),
    ),
}
UNITS |= {name: replace(unit, is_layer=True) for name, unit in LAYERS.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_body_is_a_part_alone(name: str) -> None:
    unit = UNITS[name]
    body, *others = divide(unit, 4)
    assert isinstance(body, Part) and not body.rows and body.kind is Kind.LAYERS is unit.kind
    assert {entry.name for entry in body.layout.entries} == set(unit.names) - set(unit.tables)
    assert len(others) == 4 and all(part.kind is Kind.EXPERTS for part in others)
    assert all({entry.name for entry in part.layout.entries} == set(unit.tables) for part in others)
    assert all(len(set(part.rows.values())) == 1 for part in others if isinstance(part, Part)), "the same experts of every table"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [2, 3, 7, 1000])
@pytest.mark.parametrize("name", UNITS)
def test_parts_are_the_unit(name: str, count: int, spec: PlaneSpec) -> None:
    """Copied out and back part by part, every byte of the plane is there once, and each part's views are rows of the whole's."""
    unit = UNITS[name]
    num_bytes = unit.layout.bytes(spec)
    home = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    back, seen = torch.zeros_like(home), torch.zeros(num_bytes, dtype=torch.int64)
    whole, parts = Plane(unit.layout, spec, home), divide(unit, count)
    assert 1 < len(parts) <= count + unit.is_layer
    for part in parts:
        assert isinstance(part, Part)
        buffer = torch.full((part.layout.bytes(spec),), 7, dtype=torch.uint8)
        filled = torch.zeros(buffer.numel(), dtype=torch.int64)
        for at_home, in_piece in part.stretches(spec):
            buffer[in_piece] = home[at_home]
            filled[in_piece] += 1
            seen[at_home] += 1
            back[at_home] = buffer[in_piece]
        assert bool((filled == 1).all()), "no byte of a part is left as it was"
        own = Plane(part.layout, spec, buffer)
        for entry in part.layout.entries:
            if entry.dtype in own.sections:
                expected = whole.view(unit.layout.by_name[entry.name])
                rows = part.rows.get(entry.name, range(len(expected)))
                assert torch.equal(own.view(entry).view(torch.uint8), expected[rows.start : rows.stop].view(torch.uint8))
    assert bool((seen == 1).all()) and torch.equal(back, home)


def test_what_is_no_table_is_in_part_0() -> None:
    first, *others = divide(UNITS["two sections"], 4)
    assert {entry.name for entry in first.layout.entries} == {"gate", "table", "norm"}
    assert all([entry.name for entry in part.layout.entries] == ["table"] for part in others)


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_parts_are_about_as_large(count: int) -> None:
    sizes = [part.layout.numel for part in divide(unit_of(("table", (152064, 128), BF16, True), tables=("table",)), count)]
    assert len(sizes) == count and max(sizes) - min(sizes) < 128 * count


def test_a_whole_unit_is_one_stretch() -> None:
    for unit in UNITS.values():
        for spec in SPECS:
            assert [tuple(stretch) for stretch in unit.stretches(spec)] == [(slice(0, unit.layout.bytes(spec)),) * 2]


def test_what_cannot_be_divided_is_its_own_only_part() -> None:
    without = unit_of(("table", (96, 32), BF16, True), tables=())
    few = unit_of(("table", (4, 32), BF16, True), tables=("table",))
    for unit, count in ((UNITS["a table"], 1), (without, 8), (few, 8)):
        assert divide(unit, count) == (unit,)


def test_a_unit_has_the_same_parts_every_time() -> None:
    assert divide(UNITS["a table"], 3) is divide(UNITS["a table"], 3)
