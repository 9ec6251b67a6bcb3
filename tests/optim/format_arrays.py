"""Spans of any format for the kernels' tests, and what is left in them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.master import split_master, split_master24
from layerferry.optim.blocks import encode
from layerferry.optim.kernels import Kernels, Moment, Operands
from layerferry.optim.rounding import Rounding
from layerferry.optim.rules import AdamWScalars, DescentScalars, LionScalars, MomentumScalars, Rule, SgdScalars
from tests.optim.arrays import scalars

MASTERS = ("whole", "fp32", "24bit", "bf16")
RULES: dict[str, tuple[type[Rule], int]] = {
    "adamw": (AdamWScalars, 2),
    "lion": (LionScalars, 1),
    "sgd": (SgdScalars, 0),
    "momentum": (SgdScalars, 1),
    "muon before": (MomentumScalars, 1),
    "muon behind": (DescentScalars, 0),
}
"""Rule and the moments that it keeps."""
FORMATS = [
    (rule, master, moments)
    for rule, master, moments in itertools.product(RULES, MASTERS, ("fp32", "8bit"))
    if not (RULES[rule][1] == 0 and moments == "8bit")
]


def rule_of(name: str, step: int = 3, **changes: float) -> Rule:
    numbers = {"grad_scale": 0.83, "step_size": 1e-3, "decay": 1e-4} | changes
    if name == "muon before":
        return MomentumScalars(grad_scale=numbers["grad_scale"], momentum=0.95, one_minus_momentum=0.05)
    if name == "muon behind":
        return DescentScalars(step_size=numbers["step_size"], decay=numbers["decay"])
    if name == "lion":
        return LionScalars(beta1=0.9, one_minus_beta1=0.1, beta2=0.99, one_minus_beta2=0.01, **numbers)
    if name in ("sgd", "momentum"):
        return SgdScalars(momentum=0.9, **numbers)
    return scalars(step)


def rounding(step: int = 3) -> Rounding:
    return Rounding.of(seed=0, step=step, stream=5)


def operands(
    arrays: dict[str, Tensor], rule: str, master: str, moments: str, *, grad_dtype: torch.dtype = torch.bfloat16, start: int = 0
) -> Operands:
    """Fresh planes; ``arrays`` as ``tests/optim/arrays.py`` makes them, whole blocks."""
    whole = arrays["master"]
    weight: Tensor
    residue: Tensor | None = None
    if master == "whole":
        weight, grad_dtype = whole.clone(), torch.float32
    elif master == "bf16":
        weight = whole.bfloat16()
    else:
        weight, residue = split_master(whole) if master == "fp32" else split_master24(whole)
    kept = [_moment(arrays[name], moments, signed=name == "exp_avg") for name in ("exp_avg", "exp_avg_sq")[: RULES[rule][1]]]
    first, second = (*kept, None, None)[:2]
    grad = arrays["grad"].to(grad_dtype, copy=True)
    return Operands(weight=weight, residue=residue, grad=grad, first=first, second=second, start=start)


def _moment(values: Tensor, moments: str, *, signed: bool) -> Moment:
    if moments == "fp32":
        return Moment(values=values.clone())
    clean = torch.where(values.abs() < torch.finfo(torch.float32).smallest_normal, 0.0, values)
    codes, exponents = encode(clean, signed=signed)
    return Moment(values=codes, exponents=exponents)


def run(kernels: Kernels, given: Operands, rule: str, steps: int = 1, threads: int = 1) -> dict[str, Tensor]:
    for step in range(1, steps + 1):
        kernels.update(rule_of(rule, step), given, rounding=rounding(step), threads=threads)
    return left(given)


def left(given: Operands) -> dict[str, Tensor]:
    """Every plane, by name."""
    found: dict[str, Any] = {"weight": given.weight, "residue": given.residue, "grad": given.grad}
    for name, moment in (("first", given.first), ("second", given.second)):
        if moment is not None:
            found |= {name: moment.values, f"{name} exponents": moment.exponents}
    return {name: plane for name, plane in found.items() if plane is not None}


def blocks_of(numel: int) -> int:
    return -(-numel // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
