"""Updates of planes that live on a CUDA device: one pass in Triton, the same bits as the CPU's.

The operations are those of ``rules.py`` in the same order, each rounded once: fused multiply-add is off for
the launch, square root and division are the correctly rounded ones. So a unit may be moved between host and device without
changing a run. Where Triton is missing, or cannot build its launcher (it wants a C compiler and Python's headers), the torch
reference serves. Checked by ``tests/gpu/test_device_adamw.py`` and ``test_device_formats.py`` against the CPU kernels, bit for
bit, and by ``tests/optim/test_device_kernels.py``.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable
from dataclasses import astuple
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.optim.device_factored import TritonFactored
from layerferry.optim.kernels import MASTERS, NUMBERS, Operands, kept_bits, tuned_update
from layerferry.optim.reference import ReferenceKernels
from layerferry.optim.rounding import Rounding, signed
from layerferry.optim.rules import RULES, SMALLEST_NORMAL, AdamWScalars, Rule

log = logging.getLogger(__name__)

BLOCK = 1024
ROWS = 8
"""Blocks of 128 that one program of the general pass works on."""


class TritonKernels(ReferenceKernels):
    """``Kernels`` for CUDA tensors; splitting and joining whole planes stays with the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.factored = TritonFactored(self._launched)
        self._cannot_be_built = False

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
        planes = (weight, residue, grad, exp_avg, exp_avg_sq)
        if not self._launched(lambda: _launch("split", (weight.view(torch.int16), *planes[1:]), scalars)):
            super().adamw_split(*planes, scalars=scalars, threads=threads)

    def adamw_fp32(
        self, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, scalars: AdamWScalars, threads: int
    ) -> None:
        planes = (weight, grad, exp_avg, exp_avg_sq)
        if not self._launched(lambda: _launch("fp32", planes, scalars)):
            super().adamw_fp32(*planes, scalars=scalars, threads=threads)

    def update(self, rule: Rule, operands: Operands, *, rounding: Rounding, threads: int) -> None:
        if tuned_update(self, rule, operands, threads=threads):
            return
        if not self._launched(lambda: _launch_update(rule, operands, rounding)):
            super().update(rule, operands, rounding=rounding, threads=threads)

    def _launched(self, launch: Callable[[], None]) -> bool:
        """Whether ``launch`` was possible. What cannot be built has touched no plane, and is not tried again."""
        if not self._cannot_be_built:
            try:
                launch()
                return True
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                if not (isinstance(error, OSError | subprocess.CalledProcessError) or "C compiler" in str(error)):
                    raise
                log.warning("updates @device run in plain torch, which is slower: Triton cannot build its launcher: %s", error)
                self._cannot_be_built = True
        return False


def device_kernels() -> ReferenceKernels:
    """Triton's where Triton is installed, else torch's."""
    return TritonKernels() if find_spec("triton") is not None else ReferenceKernels()


def _pointers(operands: Operands) -> list[Tensor]:
    """Every plane the kernel may ask for; the gradient in the place of those that are not there, which are never read."""
    weight, grad = operands.weight, operands.grad
    found = [weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight, operands.residue, grad]
    for moment in (operands.first, operands.second):
        found += [None, None] if moment is None else [moment.values, moment.exponents]
    return [grad if tensor is None else tensor for tensor in found]


def _launch(name: str, tensors: tuple[Tensor, ...], scalars: AdamWScalars) -> None:
    numel = tensors[0].numel()
    numbers = [getattr(scalars, field) for field in scalars.__slots__]
    _kernels()[name][(-(-numel // BLOCK),)](
        *tensors, numel, *numbers, SMALLEST=SMALLEST_NORMAL, BLOCK=BLOCK, enable_fp_fusion=False, num_warps=4
    )


def _launch_update(rule: Rule, operands: Operands, rounding: Rounding) -> None:
    first, second = operands.first, operands.second
    numbers = astuple(rule)
    num_blocks = operands.weight.numel() // BLOCK_ELEMENTS
    _kernels()["update"][(-(-num_blocks // ROWS),)](
        *_pointers(operands),
        num_blocks,
        operands.start // BLOCK_ELEMENTS,
        signed(rounding.key_low),
        signed(rounding.key_high),
        *numbers,
        *(0.0,) * (NUMBERS - len(numbers)),
        RULE=RULES.index(type(rule)),
        MASTER=MASTERS.index(kept_bits(operands)),
        HAS_FIRST=first is not None,
        FIRST_CODED=first is not None and first.coded,
        SECOND_CODED=second is not None and second.coded,
        SMALLEST=SMALLEST_NORMAL,
        ROWS=ROWS,
        BLOCK=BLOCK_ELEMENTS,
        enable_fp_fusion=False,
        num_warps=4,
    )


@functools.cache
def _kernels() -> dict[str, Any]:
    from layerferry.optim import triton_adamw, triton_formats

    return {"split": triton_adamw.adamw_split, "fp32": triton_adamw.adamw_fp32, "update": triton_formats.update}
