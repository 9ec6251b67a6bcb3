"""AdamW over layouts: every section and span, against fp64 and fp32 ``torch.optim.AdamW``, and at a tiny learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError
from layerferry.layout import FP32_PLANE, GRAD_PLANE, RESIDUE_PLANE, WEIGHT_PLANE, Layout, ParameterSpec, Plane, PlaneSpec
from layerferry.master import join_master, split_master
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import Optimizer, StepHyper
from layerferry.optim.kernels import Kernels
from layerferry.optim.load import load_kernels
from layerferry.optim.reference import ReferenceKernels

BETAS = (0.9, 0.95)
ULP = 2.0**-24
"""Half a relative fp32 ulp: the bound of one rounding."""

MIXED = Layout.of(
    [
        ParameterSpec(name="weight", shape=(37, 11), dtype=torch.bfloat16),
        ParameterSpec(name="norm", shape=(37,), dtype=torch.bfloat16, decays=False),
        ParameterSpec(name="up", shape=(300,), dtype=torch.bfloat16),
        ParameterSpec(name="gate", shape=(5, 7), dtype=torch.float32),
        ParameterSpec(name="gate_bias", shape=(5,), dtype=torch.float32, decays=False),
    ]
)
FP32 = Layout.of(
    [
        ParameterSpec(name="weight", shape=(37, 11), dtype=torch.float32),
        ParameterSpec(name="norm", shape=(37,), dtype=torch.float32, decays=False),
    ]
)


def planes_of(layout: Layout, optimizer: Optimizer) -> dict[str, Plane]:
    specs: dict[str, PlaneSpec] = {"weight": WEIGHT_PLANE, "residue": RESIDUE_PLANE, "grad": GRAD_PLANE, **optimizer.state_planes}
    if not layout.section_numel[0]:
        del specs["residue"]
    return {name: Plane(layout, spec, torch.zeros(layout.bytes(spec), dtype=torch.uint8)) for name, spec in specs.items()}


def masters(layout: Layout, planes: dict[str, Plane]) -> list[Tensor]:
    """fp32 values of the parameters, in the order of the entries."""
    return [
        join_master(planes["weight"].view(entry), planes["residue"].view(entry))
        if entry.dtype == torch.bfloat16
        else planes["weight"].view(entry).clone()
        for entry in layout.entries
    ]


def fill(layout: Layout, planes: dict[str, Plane], generator: torch.Generator) -> None:
    """Random fp32 masters."""
    for entry in layout.entries:
        value = torch.randn(entry.shape, generator=generator) * 0.02
        if entry.dtype == torch.bfloat16:
            weight, residue = split_master(value)
            planes["weight"].view(entry).copy_(weight)
            planes["residue"].view(entry).copy_(residue)
        else:
            planes["weight"].view(entry).copy_(value)


def fill_gradients(planes: dict[str, Plane], generator: torch.Generator) -> list[Tensor]:
    """Random gradients, and their values as fp32."""
    for view in planes["grad"].views():
        view.copy_(torch.randn(view.shape, generator=generator) * 1e-3)
    return [view.float() for view in planes["grad"].views()]


@pytest.mark.parametrize("layout", [MIXED, FP32], ids=["mixed", "fp32"])
@pytest.mark.parametrize("kernels", [ReferenceKernels(), load_kernels()], ids=["reference", "native"])
def test_twenty_steps_are_adamw_in_fp64_up_to_rounding(layout: Layout, kernels: Kernels) -> None:
    """Oracle: ``torch.optim.AdamW`` in fp64 with two groups, fed the same gradients.

    Bound per step, first order in u = 2**-24: the master rounds once, u |p|. The update U = step_size m / (sqrt(v) c + eps)
    carries the errors of the moments: scalar, product and sum compound over steps to at most 3 u / (1 - beta) of the largest
    term, 30 u for m and 60 u for v, the latter halved by the root; the other operations add 8 u. With |U| <= lr M, where M
    bounds |m| / sqrt(v) with bias corrections (here 10 for gaussian gradients), that is 68 u M lr; decay adds 3 u lr wd |p|.
    """
    lr, decay, scale, steps = 1e-3, 0.1, 0.37, 20
    optimizer = AdamW(betas=BETAS, weight_decay=decay, kernels=kernels)
    generator = torch.Generator().manual_seed(1)
    planes = planes_of(layout, optimizer)
    fill(layout, planes, generator)
    oracle = [torch.nn.Parameter(value.double()) for value in masters(layout, planes)]
    groups: list[dict[str, Any]] = [
        {"params": [p for p, entry in zip(oracle, layout.entries, strict=True) if entry.decays is decays], "weight_decay": wd}
        for decays, wd in ((True, decay), (False, 0.0))
    ]
    torch_adamw = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=1e-8)
    for step in range(1, steps + 1):
        for parameter, gradient in zip(oracle, fill_gradients(planes, generator), strict=True):
            parameter.grad = gradient.double() * scale
        optimizer.step(planes, layout, StepHyper(lr=lr, step=step, grad_scale=scale), threads=2)
        torch_adamw.step()
        for ours, theirs in zip(masters(layout, planes), oracle, strict=True):
            bound = step * ULP * (theirs.detach().abs() * 1.01 + lr * (68 * 10 + 1))
            assert bool(((ours.double() - theirs.detach()).abs() <= bound).all())


def test_one_step_is_within_two_ulp_of_torch_adamw_in_fp32() -> None:
    """Where the update is below |p| / 64, ours errs by half an ulp of p and 15 u |U|, torch's by two roundings (the decay is
    applied on its own), the first possibly one binade up: 1.5 ulp and 15 u |U|. Sum below 2 + 30/64 ulp: at most 2 apart.
    """
    optimizer = AdamW(betas=BETAS, weight_decay=0.1)
    generator = torch.Generator().manual_seed(2)
    planes = planes_of(FP32, optimizer)
    fill(FP32, planes, generator)
    lr = 1e-5
    parameters = [torch.nn.Parameter(value) for value in masters(FP32, planes)]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter, gradient in zip(parameters, fill_gradients(planes, generator), strict=True):
        parameter.grad = gradient
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=1e-8, weight_decay=0.1, foreach=False).step()
    optimizer.step(planes, FP32, StepHyper(lr=lr, step=1), threads=1)
    for ours, theirs, start in zip(masters(FP32, planes), parameters, before, strict=True):
        small = (theirs.detach() - start).abs() < start.abs() / 64
        assert small.float().mean() > 0.9
        apart = (ours.view(torch.int32) - theirs.detach().view(torch.int32)).abs()
        assert int(apart[small].max()) <= 2


@pytest.mark.parametrize("layout", [MIXED, FP32], ids=["mixed", "fp32"])
def test_native_steps_are_reference_steps_and_padding_stays_zero(layout: Layout) -> None:
    results = []
    for kernels in (load_kernels(), ReferenceKernels()):
        optimizer = AdamW(betas=BETAS, weight_decay=0.1, kernels=kernels)
        generator = torch.Generator().manual_seed(3)
        planes = planes_of(layout, optimizer)
        fill(layout, planes, generator)
        for step in range(1, 6):
            fill_gradients(planes, generator)
            optimizer.step(planes, layout, StepHyper(lr=1e-3, step=step, grad_scale=0.5), threads=step)
        results.append(planes)
    for name in results[0]:
        assert torch.equal(results[0][name].buffer, results[1][name].buffer), name
    for plane in results[0].values():
        for view in plane.views() if plane.spec is not RESIDUE_PLANE else ():
            assert view.any()
            view.zero_()
        if plane.spec is not RESIDUE_PLANE:
            assert not plane.buffer.any(), "padding moved"


def test_decay_reaches_the_decayed_spans_only() -> None:
    """Zero gradients: what moves, moves by decay."""
    optimizer = AdamW(weight_decay=0.1)
    planes = planes_of(MIXED, optimizer)
    fill(MIXED, planes, torch.Generator().manual_seed(4))
    before = masters(MIXED, planes)
    optimizer.step(planes, MIXED, StepHyper(lr=1e-2, step=1), threads=1)
    for entry, old, new in zip(MIXED.entries, before, masters(MIXED, planes), strict=True):
        torch.testing.assert_close(new, old * (1 - 1e-3) if entry.decays else old, rtol=2 * ULP, atol=0.0)


def test_tiny_learning_rates_move_bf16_weights_as_fp32_adamw_does() -> None:
    """lr 1e-6, 200 steps: the masters go where fp32 AdamW goes, and so do the bf16 weights; plain bf16 AdamW stands still."""
    numel, lr, steps = 20_000, 1e-6, 200
    layout = Layout.of([ParameterSpec(name="weight", shape=(numel,), dtype=torch.bfloat16)])
    optimizer = AdamW(weight_decay=0.01)
    planes = planes_of(layout, optimizer)
    generator = torch.Generator().manual_seed(5)
    start = (torch.randn(numel, generator=generator) * 0.02).bfloat16()
    planes["weight"].views()[0].copy_(start)
    fp32, bf16 = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
    oracles = [torch.optim.AdamW([parameter], lr=lr, weight_decay=0.01) for parameter in (fp32, bf16)]
    drift = torch.randn(numel, generator=generator)
    for step in range(1, steps + 1):
        gradient = ((drift + torch.randn(numel, generator=generator)) * 1e-3).bfloat16()
        planes["grad"].views()[0].copy_(gradient)
        optimizer.step(planes, layout, StepHyper(lr=lr, step=step), threads=1)
        fp32.grad, bf16.grad = gradient.float(), gradient.clone()
        for oracle in oracles:
            oracle.step()
    weight, master = planes["weight"].views()[0], masters(layout, planes)[0]
    wanted, _ = split_master(fp32.detach())
    moved, should_move = weight != start, wanted != start
    assert should_move.float().mean() > 0.3, "the trial must be one where fp32 AdamW moves bf16 weights"
    assert abs(float(moved.float().mean() - should_move.float().mean())) < 1e-3
    assert float((weight == wanted).float().mean()) > 0.999
    ours, theirs = master - start.float(), fp32.detach() - start.float()
    assert float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)) > 0.99999
    clear = theirs.abs() > lr
    assert torch.equal(ours[clear].sign(), theirs[clear].sign())
    stuck = (bf16.detach() != start)[start.abs() > 0.01]
    assert stuck.float().mean() < 0.01, "the control must fail, or the test shows nothing"


def test_planes_and_bytes_agree() -> None:
    optimizer = AdamW.of(OptimConfig())
    assert dict(optimizer.state_planes) == {"exp_avg": FP32_PLANE, "exp_avg_sq": FP32_PLANE}
    layout = Layout.of([ParameterSpec(name="weight", shape=(128,), dtype=torch.bfloat16)])
    assert sum(layout.bytes(spec) for spec in optimizer.state_planes.values()) == optimizer.bytes_per_param() * layout.numel


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"adam_beta1": 1.0}, "adam_beta1"),
        ({"adam_beta2": -0.1}, "adam_beta2"),
        ({"adam_epsilon": 0.0}, "adam_epsilon"),
        ({"adam_epsilon": float("nan")}, "adam_epsilon"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        AdamW.of(OptimConfig(**settings))  # type: ignore[arg-type]
