"""AdamW in plain torch: the meaning of the native kernels, their stand-in without a compiler, and the step of device planes.

The operations and their order are those of ``kernels.py``, one fp32 rounding each. ``addcmul``, ``lerp`` and ``alpha=`` do not
occur: they are fused multiply-adds on some CPUs and would change bits.
Runs in blocks, so that temporaries stay small beside a unit's planes. ``threads`` is torch's own affair and ignored here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from layerferry.master import join_master, split_master
from layerferry.optim.kernels import AdamWScalars

SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal

CPU_BLOCK = 1 << 20
"""Elements at a time: a few MiB of temporaries, and enough work for torch's threads."""
DEVICE_BLOCK = 1 << 24
"""On a device: enough work per launch."""


class ReferenceKernels:
    """``Kernels`` in torch, on any device."""

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
        for w, r, g, m, v in _blocks(weight, residue, grad, exp_avg, exp_avg_sq):
            master = join_master(w, r)
            _update(master, g.to(torch.float32), m, v, scalars)
            new_weight, new_residue = split_master(master)
            w.copy_(new_weight)
            r.copy_(new_residue)

    def adamw_fp32(
        self, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, scalars: AdamWScalars, threads: int
    ) -> None:
        for w, g, m, v in _blocks(weight, grad, exp_avg, exp_avg_sq):
            _update(w, g, m, v, scalars)

    def split(self, master: Tensor, weight: Tensor, residue: Tensor, *, threads: int) -> None:
        for x, w, r in _blocks(master, weight, residue):
            new_weight, new_residue = split_master(x)
            w.copy_(new_weight)
            r.copy_(new_residue)

    def join(self, weight: Tensor, residue: Tensor, master: Tensor, *, threads: int) -> None:
        for w, r, x in _blocks(weight, residue, master):
            x.copy_(join_master(w, r))


def _update(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: AdamWScalars) -> None:
    """``master`` [n] fp32, ``grad`` [n] fp32, moments [n] fp32: all in place but ``grad``."""
    scaled = grad * scalars.grad_scale
    m = _without_denormals(exp_avg * scalars.beta1 + scaled * scalars.one_minus_beta1)
    v = _without_denormals(exp_avg_sq * scalars.beta2 + scaled * scalars.one_minus_beta2 * scaled)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    denominator = _exact_sqrt(v) * scalars.rsqrt_bias_correction2 + scalars.eps
    master.sub_(m / denominator * scalars.step_size + master * scalars.decay)


def _exact_sqrt(values: Tensor) -> Tensor:
    """The correctly rounded fp32 root, as processors give it; torch's own may come from a library that is one ulp off.

    Through fp64 the rounding is right even if that root is an ulp off: no fp32 root lies within 2**-50 of a rounding boundary.
    """
    # TRAP: plain sqrt differs in 1 of some 400 values with MKL (tests/optim/test_kernels.py)
    return values.to(torch.float64).sqrt().to(torch.float32)


def _without_denormals(values: Tensor) -> Tensor:
    return torch.where(values.abs() < SMALLEST_NORMAL, 0.0, values)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    block = CPU_BLOCK if tensors[0].device.type == "cpu" else DEVICE_BLOCK
    for start in range(0, tensors[0].numel(), block):
        yield tuple(tensor[start : start + block] for tensor in tensors)
