"""Arrays for the optimizer's tests: ordinary, extreme, and compared by bits."""

from __future__ import annotations

import torch
from torch import Tensor

from layerferry.master import split_master
from layerferry.optim.kernels import Kernels
from layerferry.optim.rules import AdamWScalars

NAMES = ("weight", "residue", "grad", "exp_avg", "exp_avg_sq")


def scalars(step: int = 3, **changes: float) -> AdamWScalars:
    settings = {"lr": 1e-3, "grad_scale": 0.83, "eps": 1e-8, "weight_decay": 0.1} | changes
    return AdamWScalars.of(step=step, betas=(0.9, 0.95), **settings)


def ordinary(numel: int, seed: int = 0) -> dict[str, Tensor]:
    """master, grad and moments as training has them, [numel] fp32 each."""
    generator = torch.Generator().manual_seed(seed)
    master, grad, exp_avg, exp_avg_sq = (torch.randn(numel, generator=generator) for _ in range(4))
    return {"master": master * 0.02, "grad": grad * 1e-3, "exp_avg": exp_avg * 1e-3, "exp_avg_sq": exp_avg_sq.square() * 1e-6}


def extreme(numel: int, seed: int = 0) -> dict[str, Tensor]:
    """Every exponent from denormals to the largest, zeros of both signs, infinities, NaN: random bit patterns."""
    generator = torch.Generator().manual_seed(seed)
    arrays = {}
    for name in ("master", "grad", "exp_avg", "exp_avg_sq"):
        bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)
        special = torch.tensor(
            [0, -(2**31), 1, 0x7F800000, -0x800000, 0x7FFFFFFF, 0x7F7FFFFF, 0x00800000, 0x007FFFFF], dtype=torch.int32
        )
        places = torch.randint(0, numel, (min(numel, 64),), generator=generator)
        bits[places] = special[torch.arange(len(places)) % len(special)]
        arrays[name] = bits.view(torch.float32)
    arrays["exp_avg_sq"] = arrays["exp_avg_sq"].abs()
    return arrays


def split_planes(arrays: dict[str, Tensor], grad_dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Fresh planes, in the order that ``adamw_split`` takes them."""
    weight, residue = split_master(arrays["master"])
    return {
        "weight": weight,
        "residue": residue,
        "grad": arrays["grad"].to(grad_dtype),
        "exp_avg": arrays["exp_avg"].clone(),
        "exp_avg_sq": arrays["exp_avg_sq"].clone(),
    }


def fp32_planes(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"weight": arrays["master"].clone()} | {name: arrays[name].clone() for name in ("grad", "exp_avg", "exp_avg_sq")}


def run_split(kernels: Kernels, planes: dict[str, Tensor], steps: int = 1, threads: int = 1) -> dict[str, Tensor]:
    for step in range(1, steps + 1):
        kernels.adamw_split(*planes.values(), scalars=scalars(step), threads=threads)
    return planes


def run_fp32(kernels: Kernels, planes: dict[str, Tensor], steps: int = 1, threads: int = 1) -> dict[str, Tensor]:
    for step in range(1, steps + 1):
        kernels.adamw_fp32(*planes.values(), scalars=scalars(step), threads=threads)
    return planes


def assert_same_bits(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Bits, except that a NaN is a NaN: which operand's payload survives is the processor's affair."""
    assert got.keys() == wanted.keys()
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    for name, ours in got.items():
        theirs = wanted[name]
        integer = integers.get(ours.dtype, ours.dtype)
        same = ours.view(integer) == theirs.view(integer)
        if ours.dtype.is_floating_point:
            same |= ours.isnan() & theirs.isnan()
        assert bool(same.all()), f"{name}: {int((~same).sum())} of {same.numel()} differ, first at {int((~same).nonzero()[0])}"
