"""AdamW on an exact fp32 master: 8 bytes of state per parameter, decoupled weight decay, the clip coefficient in the same pass.

The meaning is that of ``torch.optim.AdamW``. The arithmetic is written down in ``kernels.py``; this file walks the spans.
Planes in host memory go to the native kernels, planes on a device to the torch ones: the same bits (``tests/optim``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError
from layerferry.layout import FP32_PLANE, GRAD, RESIDUE, WEIGHT, Layout, Plane, PlaneSpec
from layerferry.optim.base import EXP_AVG, EXP_AVG_SQ, StepHyper
from layerferry.optim.device_kernels import device_kernels
from layerferry.optim.kernels import AdamWScalars, Kernels
from layerferry.optim.load import load_kernels
from layerferry.optim.reference import SMALLEST_NORMAL


class AdamW:
    """An ``Optimizer``. Holds no state: two steps with the same planes and ``StepHyper`` give the same bits."""

    def __init__(
        self,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        kernels: Kernels | None = None,
    ) -> None:
        """``kernels`` None: the native ones, or the torch reference where they cannot be built."""
        for key, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"{key}: {beta} is outside [0, 1)")
        if not eps >= SMALLEST_NORMAL:  # padding is 0 / (0 + eps)
            raise ConfigError(
                f"adam_epsilon: {eps} is below {SMALLEST_NORMAL:.3e}: parameters without gradient would be divided by it"
            )
        if not weight_decay >= 0.0:
            raise ConfigError(f"weight_decay: {weight_decay} is negative")
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self._host_kernels = load_kernels() if kernels is None else kernels
        self._device_kernels = device_kernels()

    @classmethod
    def of(cls, config: OptimConfig) -> AdamW:
        betas = (config.adam_beta1, config.adam_beta2)
        return cls(betas=betas, eps=config.adam_epsilon, weight_decay=config.weight_decay)

    @property
    def state_planes(self) -> Mapping[str, PlaneSpec]:
        return {EXP_AVG: FP32_PLANE, EXP_AVG_SQ: FP32_PLANE}

    def bytes_per_param(self) -> float:
        return 8.0

    def step(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See ``Optimizer.step``."""
        kernels = self._host_kernels if planes[WEIGHT].buffer.device.type == "cpu" else self._device_kernels
        for span in layout.spans:
            scalars = self._scalars(hyper, span.decays)
            weight, grad, exp_avg, exp_avg_sq = (
                planes[name].sections[span.dtype][span.start : span.stop] for name in (WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ)
            )
            if span.dtype == torch.bfloat16:
                residue = planes[RESIDUE].sections[span.dtype][span.start : span.stop]
                kernels.adamw_split(weight, residue, grad, exp_avg, exp_avg_sq, scalars=scalars, threads=threads)
            else:
                kernels.adamw_fp32(weight, grad, exp_avg, exp_avg_sq, scalars=scalars, threads=threads)

    def _scalars(self, hyper: StepHyper, decays: bool) -> AdamWScalars:
        return AdamWScalars.of(
            lr=hyper.lr,
            step=hyper.step,
            grad_scale=hyper.grad_scale,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay if decays else 0.0,
        )
