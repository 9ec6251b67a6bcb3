"""AdamW for planes that live on a CUDA device: one pass in Triton, the same bits as the CPU's.

The operations are those of ``kernels.py`` in the same order, each rounded once: fused multiply-add is switched off for the
launch, square root and division are the correctly rounded ones. So a unit may be moved between host and device without
changing a run. Where Triton is missing the torch reference serves. Checked by ``tests/gpu/test_device_adamw.py`` against
the CPU kernels, bit for bit.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from layerferry.optim.kernels import AdamWScalars
from layerferry.optim.reference import ReferenceKernels
from layerferry.optim.rules import SMALLEST_NORMAL

BLOCK = 1024


class TritonKernels(ReferenceKernels):
    """``Kernels`` for CUDA tensors; splitting and joining whole planes stays with the reference."""

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
        _launch("split", (weight.view(torch.int16), residue, grad, exp_avg, exp_avg_sq), scalars)

    def adamw_fp32(
        self, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, scalars: AdamWScalars, threads: int
    ) -> None:
        _launch("fp32", (weight, grad, exp_avg, exp_avg_sq), scalars)


def device_kernels() -> ReferenceKernels:
    """Triton's where Triton is installed, else torch's."""
    return TritonKernels() if find_spec("triton") is not None else ReferenceKernels()


def _launch(name: str, tensors: tuple[Tensor, ...], scalars: AdamWScalars) -> None:
    numel = tensors[0].numel()
    numbers = [getattr(scalars, field) for field in scalars.__slots__]
    _kernels()[name][(-(-numel // BLOCK),)](
        *tensors, numel, *numbers, SMALLEST=SMALLEST_NORMAL, BLOCK=BLOCK, enable_fp_fusion=False, num_warps=4
    )


@functools.cache
def _kernels() -> dict[str, Any]:
    from layerferry.optim import triton_adamw

    return {"split": triton_adamw.adamw_split, "fp32": triton_adamw.adamw_fp32}
