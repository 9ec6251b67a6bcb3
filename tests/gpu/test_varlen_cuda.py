"""torch's variable-length kernel in packed rows: samples stay apart, and the loss is that of the mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from layerferry.backends.cuda import device_count
from layerferry.engine.batch import MicroBatch
from layerferry.models import sinks
from layerferry.plan import Plan
from tests.conformance.harness import relative
from tests.gpu.small import FAMILIES, batches, engine_of, gradients, model_of
from tests.models.sinks_in_bf16 import assert_as_close_to_fp32_as_products

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]


def packed(micro_batch: MicroBatch) -> MicroBatch:
    rows, tokens = micro_batch.input_ids.shape
    cut = torch.tensor([tokens // 4 + 8 * row for row in range(rows)])
    positions = torch.stack([torch.cat([torch.arange(int(c)), torch.arange(tokens - int(c))]) for c in cut])
    return dataclasses.replace(micro_batch, position_ids=positions, isolated=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_boundaries_and_mask_agree(compiled: bool) -> None:
    found = []
    for varlen in (False, True):
        model = model_of("llama", torch.bfloat16)
        engine = engine_of(model, Plan(num_slots=2, compile=compiled, activation_budget=0.5 if compiled else 1.0))
        assert engine.skeleton.has_varlen
        if not varlen:
            engine.skeleton.has_varlen = False
        report = engine.step([packed(m) for m in batches(2)], lr=0.0)
        found.append((report.loss, gradients(engine)))
        engine.close()
    assert found[1][0] == pytest.approx(found[0][0], rel=2e-3)
    for name, expected in found[0][1].items():
        assert relative(found[1][1][name], expected) < 3e-2, name  # bf16 attention by two kernels: 2**-8 a rounding, few of them


@pytest.mark.parametrize("width", [8, 64, 128, 192, 256])
def test_the_kernels_are_right_with_sinks(width: int) -> None:
    assert sinks.work_on(torch.device("cuda", torch.cuda.current_device()), width)


@pytest.mark.parametrize("compiled", [False, True])
def test_sinks_by_kernels_are_as_close_to_fp32_as_by_products(compiled: bool) -> None:
    """Rows of one sample and of several: by kernels alone are they kept apart in this family."""
    sizes = {**FAMILIES["gpt_oss"], "num_hidden_layers": 4}

    def step(model: Any, given: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
        engine = engine_of(model, Plan(num_slots=2, compile=compiled))
        assert engine.skeleton.has_varlen
        report = engine.step(given, lr=0.0)
        found = report.loss, gradients(engine)
        engine.close()
        return found

    device = torch.device("cuda", torch.cuda.current_device())
    assert_as_close_to_fp32_as_products(step, sizes, device, 128)
