"""Lion against its formula and SGD against torch's, on an fp32 master, with and without decay and momentum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerferry.layout import GRAD, RESIDUE, WEIGHT, Layout, ParameterSpec, Plane
from layerferry.master import join_master
from layerferry.optim.base import StepHyper
from layerferry.optim.formats import FormattedOptimizer
from layerferry.optim.lion import Lion
from layerferry.optim.sgd import SGD
from layerferry.store.store import plane_specs

LAYOUT = Layout.of(
    [
        ParameterSpec(name="weight", shape=(30, 20), dtype=torch.bfloat16),
        ParameterSpec(name="norm", shape=(50,), dtype=torch.bfloat16, decays=False),
        ParameterSpec(name="gate", shape=(7, 9), dtype=torch.float32),
    ]
)
STEPS, LR, GRAD_SCALE = 12, 1e-2, 0.5


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(entry.shape, generator=generator).to(entry.dtype) for entry in LAYOUT.entries]


def run(optimizer: FormattedOptimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Masters before and after ``STEPS`` steps."""
    specs = plane_specs(optimizer.state_planes)
    planes = {kind: Plane(LAYOUT, spec, torch.zeros(LAYOUT.bytes(spec), dtype=torch.uint8)) for kind, spec in specs.items()}
    generator = torch.Generator().manual_seed(0)
    for view in planes[WEIGHT].views():
        view.copy_(torch.randn(view.shape, generator=generator))
    before = masters(planes)
    for step in range(1, STEPS + 1):
        for view, gradient in zip(planes[GRAD].views(), gradients(step), strict=True):
            view.copy_(gradient)
        optimizer.step(planes, LAYOUT, StepHyper(lr=LR, step=step, grad_scale=GRAD_SCALE), threads=1)
    return before, masters(planes)


def masters(planes: dict[str, Plane]) -> list[Tensor]:
    found = []
    for entry in LAYOUT.entries:
        weight = planes[WEIGHT].view(entry)
        found.append(weight.clone() if entry.dtype == torch.float32 else join_master(weight, planes[RESIDUE].view(entry)))
    return found


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_is_its_formula(weight_decay: float) -> None:
    """In fp64. The step is a sign, so the two part only where a blend is a rounding away from zero: nowhere here. What remains is
    one rounding of the master a step."""
    before, found = run(Lion(betas=(0.9, 0.99), weight_decay=weight_decay))
    for number, entry in enumerate(LAYOUT.entries):
        master, momentum = before[number].double(), torch.zeros(entry.shape, dtype=torch.float64)
        decay = weight_decay if entry.decays else 0.0
        for step in range(1, STEPS + 1):
            gradient = gradients(step)[number].double() * GRAD_SCALE
            master = master * (1 - LR * decay) - LR * (0.9 * momentum + 0.1 * gradient).sign()
            momentum = 0.99 * momentum + 0.01 * gradient
        assert float((found[number].double() - master).abs().max()) < 2 * STEPS * 2.0**-24 * float(master.abs().max())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(momentum: float, weight_decay: float) -> None:
    """torch.optim.SGD in fp64: momentum sums twelve gradients, each rounded a few times."""
    before, found = run(SGD(momentum=momentum, weight_decay=weight_decay))
    parameters = [torch.nn.Parameter(master.double()) for master in before]
    groups = [
        {"params": [p for p, e in zip(parameters, LAYOUT.entries, strict=True) if e.decays is decays], "weight_decay": decay}
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]
    theirs = torch.optim.SGD(groups, lr=LR, momentum=momentum)
    for step in range(1, STEPS + 1):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.double() * GRAD_SCALE
        theirs.step()
    for ours, parameter in zip(found, parameters, strict=True):
        assert float((ours.double() - parameter.detach()).abs().max()) < 4 * STEPS * 2.0**-24 * float(
            parameter.detach().abs().max()
        )
