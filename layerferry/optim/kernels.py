"""The seam between an optimizer and whatever computes it: updates over flat spans, native or in torch.

``Kernels.update`` takes any rule (``rules.py``) and any format of planes (``formats.py``); AdamW with fp32 moments has kernels of
its own, which ``update`` uses where they serve: the same bits, tuned to the last percent.
Implementations: ``native_kernels.py`` (C++), ``reference.py`` (torch), ``device_kernels.py`` (Triton);
``tests/optim/test_kernels.py`` and ``test_formats.py`` hold them equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from layerferry.optim.factored import Factored, FactoredKernels
from layerferry.optim.rounding import Rounding
from layerferry.optim.rules import AdamWScalars, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment of a span: fp32, or 8-bit codes with their blocks' exponents (``blocks.py``)."""

    values: Tensor  # [n] fp32, or uint8
    exponents: Tensor | None = None  # [n / 128] uint8

    @property
    def coded(self) -> bool:
        return self.exponents is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The planes of one span, whole blocks, all at one place. ``first`` and ``second`` are the moments that the rule has."""

    weight: Tensor  # [n] bf16, or fp32: the whole master
    residue: Tensor | None  # [n] int16 or int8; None: the weight is all
    grad: Tensor  # [n] bf16 or fp32; written by MomentumScalars alone
    first: Moment | None = None
    second: Moment | None = None
    start: int = 0
    """Place of the first element in its section: what random numbers are counted by."""


NUMBERS = 9
"""The most that a rule has."""
MASTERS = (torch.float32, torch.int16, torch.int8, None)
"""In the order of ``enum Master`` in ``native/masters.h``: see ``kept_bits``."""


def kept_bits(operands: Operands | Factored) -> torch.dtype | None:
    """What makes the master: fp32 in one piece, the residue's type, None for bf16 alone."""
    weight, residue = operands.weight, operands.residue
    assert weight.dtype == torch.bfloat16 or (weight.dtype == torch.float32 and residue is None)
    return torch.float32 if weight.dtype == torch.float32 else None if residue is None else residue.dtype


class Kernels(Protocol):
    """AdamW over flat, contiguous tensors of one length, in place; and the two casts of the split master.

    ``weight`` bf16 and ``residue`` int16 are the split master; ``exp_avg`` and ``exp_avg_sq`` fp32. All at one place.
    """

    @property
    def factored(self) -> FactoredKernels:
        """Adafactor, which is no rule of ``update``."""

    def adamw_split(
        self,
        weight: Tensor,
        residue: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        scalars: AdamWScalars,
        threads: int,
    ) -> None:
        """``grad`` bf16 or fp32."""

    def adamw_fp32(
        self, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, scalars: AdamWScalars, threads: int
    ) -> None:
        """``weight`` and ``grad`` fp32."""

    def split(self, master: Tensor, weight: Tensor, residue: Tensor, *, threads: int) -> None:
        """``master`` fp32 into ``weight`` and ``residue``: ``master.split_master``, in place."""

    def join(self, weight: Tensor, residue: Tensor, master: Tensor, *, threads: int) -> None:
        """``weight`` and ``residue`` into ``master``: ``master.join_master``, in place."""

    def update(self, rule: Rule, operands: Operands, *, rounding: Rounding, threads: int) -> None:
        """One step of ``rule`` on a span in any format; ``rounding`` is used where the format drops bits."""


def tuned_update(kernels: Kernels, rule: Rule, operands: Operands, *, threads: int) -> bool:
    """AdamW with fp32 moments and an fp32 master by the kernel that is made for it; False for anything else."""
    first, second = operands.first, operands.second
    if not isinstance(rule, AdamWScalars) or first is None or second is None or first.coded or second.coded:
        return False
    weight, residue, grad, m, v = operands.weight, operands.residue, operands.grad, first.values, second.values
    kept = kept_bits(operands)
    if kept == torch.int16:
        assert residue is not None
        kernels.adamw_split(weight, residue, grad, m, v, scalars=rule, threads=threads)
    elif kept == torch.float32:
        kernels.adamw_fp32(weight, grad, m, v, scalars=rule, threads=threads)
    return kept in (torch.int16, torch.float32)
