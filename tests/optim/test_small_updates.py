"""Lean formats do not lose small updates: they go the way of fp32 AdamW, where rounding to nearest does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerferry.layout import GRAD, RESIDUE, WEIGHT, Layout, ParameterSpec, Plane
from layerferry.master import join_master
from layerferry.optim import reference
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import StepHyper
from layerferry.optim.formats import StateFormat
from layerferry.optim.kernels import Kernels
from layerferry.optim.load import load_kernels
from layerferry.optim.reference import ReferenceKernels
from layerferry.optim.rounding import Rounding
from layerferry.store.store import plane_specs

NUMEL, STEPS = 128 * 32, 300
LAYOUT = Layout.of([ParameterSpec(name="weight", shape=(NUMEL,), dtype=torch.bfloat16)])
NEAREST = 0x80088800
"""Half of what is dropped, in the bits of each: exp_avg, exp_avg_sq, the master."""


def way(state_format: StateFormat, *, lr: float, kernels: Kernels | None = None) -> Tensor:
    """How far the master goes in ``STEPS`` steps on noisy gradients with a drift, 13 octaves apart."""
    optimizer = AdamW(state_format=state_format, kernels=kernels or load_kernels())
    specs = plane_specs(optimizer.state_planes)
    planes = {kind: Plane(LAYOUT, spec, torch.zeros(LAYOUT.bytes(spec), dtype=torch.uint8)) for kind, spec in specs.items()}
    weight, grad = planes[WEIGHT].views()[0], planes[GRAD].views()[0]
    generator = torch.Generator().manual_seed(0)
    weight.copy_(torch.randn(NUMEL, generator=generator) * 0.02)
    start = weight.float()
    drift = torch.randn(NUMEL, generator=generator)
    scale = torch.exp2(torch.randint(-6, 7, (NUMEL,), generator=generator).float()) * 1e-3
    for step in range(1, STEPS + 1):
        grad.copy_((drift + torch.randn(NUMEL, generator=generator)) * scale)
        optimizer.step(planes, LAYOUT, StepHyper(lr=lr, step=step, stream=1), threads=1)
    bare = state_format.master == "bf16"
    return (weight.float() if bare else join_master(weight, planes[RESIDUE].views()[0])) - start


def share(ours: Tensor, theirs: Tensor) -> float:
    """How far ``ours`` goes along ``theirs``."""
    return float((ours * theirs).sum() / theirs.square().sum())


@pytest.mark.parametrize(
    ("master", "moments", "lr", "cosine"),
    [("24bit", "fp32", 1e-7, 0.98), ("bf16", "fp32", 1e-5, 0.95), ("24bit", "8bit", 1e-7, 0.97), ("24bit", "8bit", 1e-5, 0.99)],
)
def test_the_way_is_that_of_fp32(master: str, moments: str, lr: float, cosine: float) -> None:
    """A share of 1 within 2 %: what rounding adds has no direction, and 4,096 parameters average it."""
    expected = way(StateFormat(), lr=lr)
    found = way(StateFormat(master=master, moments=moments), lr=lr)
    assert share(found, expected) == pytest.approx(1.0, abs=0.02)
    assert float(torch.nn.functional.cosine_similarity(found, expected, dim=0)) > cosine


@pytest.mark.parametrize(
    ("master", "moments", "lr", "least", "most"),
    [("24bit", "fp32", 1e-7, 0.0, 0.6), ("bf16", "fp32", 1e-6, 0.0, 0.1), ("fp32", "8bit", 1e-5, 1.2, 2.0)],
)
def test_rounding_to_nearest_would_not_do(
    monkeypatch: pytest.MonkeyPatch, master: str, moments: str, lr: float, least: float, most: float
) -> None:
    """The control: updates below half a step are lost, and a second moment that cannot fall makes the step too large or small."""
    expected = way(StateFormat(), lr=lr)

    def nearest(rounding: Rounding, start: int, numel: int, device: torch.device) -> Tensor:
        return torch.full((numel,), NEAREST, device=device)

    monkeypatch.setattr(reference, "random_words", nearest)
    found = way(StateFormat(master=master, moments=moments), lr=lr, kernels=ReferenceKernels())
    assert least <= share(found, expected) <= most
