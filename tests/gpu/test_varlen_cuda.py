"""torch's variable-length kernel in packed rows: samples stay apart, and the loss is that of the mask."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from layerferry.backends.cuda import device_count
from layerferry.engine.batch import MicroBatch
from layerferry.plan import Plan
from tests.gpu.small import batches, engine_of, gradients, model_of, relative

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
