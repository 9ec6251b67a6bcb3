"""Planes at home: exact bytes, exact values, no second copy."""

from __future__ import annotations

import pytest
import torch

from layerferry.backends.cpu import CpuBackend
from layerferry.layout import FP32_PLANE, GRAD, RESIDUE, WEIGHT, Layout, ParameterSpec
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import EXP_AVG, EXP_AVG_SQ
from layerferry.optim.reference import ReferenceKernels
from layerferry.store.store import Store, plane_specs
from layerferry.units import Unit

STATE = AdamW(kernels=ReferenceKernels()).state_planes


def unit_of(index: int = 0, *, wide: bool = True) -> Unit:
    specs = [
        ParameterSpec(name="weight", shape=(40, 30), dtype=torch.bfloat16),
        ParameterSpec(name="norm", shape=(33,), dtype=torch.bfloat16, decays=False),
    ]
    if wide:
        specs.append(ParameterSpec(name="gate", shape=(4, 30), dtype=torch.float32))
    names = {spec.name: f"layers.{index}.{spec.name}" for spec in specs}
    return Unit(name=f"layer.{index}", index=index, layout=Layout.of(specs), names=names, is_layer=True)


def store_of(*units: Unit) -> Store:
    return Store(units, plane_specs(STATE), CpuBackend())


def test_bytes_are_those_of_the_layout() -> None:
    """bf16 elements: weight 2, residue 2, grad 2, moments 8. fp32 elements: weight 4, grad 4, moments 8."""
    units = (unit_of(0), unit_of(1, wide=False))
    store = store_of(*units)
    narrow, wide = (sum(unit.layout.section_numel[section] for unit in units) for section in (0, 1))
    assert store.num_bytes == 14 * narrow + 16 * wide
    assert store.num_params == sum(unit.numel for unit in units) == 2 * (40 * 30 + 33) + 4 * 30


def test_fp32_values_come_back_bit_for_bit() -> None:
    unit = unit_of()
    store = store_of(unit)
    generator = torch.Generator().manual_seed(0)
    for entry in unit.layout.entries:
        value = torch.randn(entry.shape, generator=generator) * torch.logspace(-20, 20, entry.shape[-1])
        store.set_parameter(unit, entry, value)
        assert torch.equal(store.master(unit, entry), value)
        expected = value if entry.dtype == torch.float32 else value.bfloat16()
        assert torch.equal(store.parameter(unit, entry), expected)


def test_a_bf16_checkpoint_loads_with_residue_zero_even_over_old_values() -> None:
    unit = unit_of()
    store = store_of(unit)
    entry = unit.layout.by_name["weight"]
    store.set_parameter(unit, entry, torch.randn(entry.shape))
    value = torch.randn(entry.shape).bfloat16()
    store.set_parameter(unit, entry, value)
    assert not store.plane(unit, RESIDUE).view(entry).any()
    assert torch.equal(store.master(unit, entry), value.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_become_the_fp32_master(dtype: torch.dtype) -> None:
    unit = unit_of()
    store = store_of(unit)
    entry = unit.layout.by_name["weight"]
    value = torch.randn(entry.shape, dtype=torch.float32).to(dtype)
    store.set_parameter(unit, entry, value)
    assert torch.equal(store.master(unit, entry), value.float())


def test_parameters_do_not_touch_each_other_and_padding_stays_zero() -> None:
    unit = unit_of()
    store = store_of(unit)
    for entry in unit.layout.entries:
        store.set_parameter(unit, entry, torch.ones(entry.shape))
    total = sum(float(section.float().sum()) for section in store.plane(unit, WEIGHT).tensors())
    assert total == unit.numel


def test_views_are_views() -> None:
    unit = unit_of()
    store = store_of(unit)
    entry = unit.layout.by_name["gate"]
    store.parameter(unit, entry).fill_(5.0)
    assert bool((store.master(unit, entry) == 5.0).all())
    store.master(unit, entry).fill_(6.0)  # a copy
    assert bool((store.parameter(unit, entry) == 5.0).all())


def test_a_wrong_shape_is_caught() -> None:
    unit = unit_of()
    with pytest.raises(AssertionError, match="weight"):
        store_of(unit).set_parameter(unit, unit.layout.by_name["weight"], torch.zeros(30, 40))


def test_planes_begin_empty_and_gradients_may_be_wide() -> None:
    unit = unit_of()
    store = Store([unit], plane_specs(STATE, grad=FP32_PLANE), CpuBackend())
    assert set(store.planes(unit)) == {WEIGHT, RESIDUE, GRAD, EXP_AVG, EXP_AVG_SQ}
    assert not any(plane.buffer.any() for plane in store.planes(unit).values())
    assert {section.dtype for section in store.plane(unit, GRAD).tensors()} == {torch.float32}


def test_units_on_the_device_sum_their_gradient_in_fp32() -> None:
    units = (unit_of(0), unit_of(1))
    store = Store(units, plane_specs(STATE), CpuBackend(), on_device=[1])
    assert store.plane(units[0], GRAD).sections[torch.bfloat16].dtype == torch.bfloat16
    assert store.plane(units[1], GRAD).sections[torch.bfloat16].dtype == torch.float32
