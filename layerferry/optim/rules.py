"""Update rules but for the arrays: their numbers, computed in double and rounded to fp32 once, and their arithmetic in torch.

One fp32 rounding per operation, in the order written (``native/formats.cpp`` and ``triton_formats.py`` have the same). ``scaled``
is the gradient times the clip coefficient; moments below the smallest normal number become 0::

    AdamW   m = beta1 * m + one_minus_beta1 * scaled
            v = beta2 * v + (one_minus_beta2 * scaled) * scaled
            master = master - (step_size * (m / (sqrt(v) * rsqrt_bias_correction2 + eps)) + decay * master)
    Lion    step = step_size * sign(beta1 * m + one_minus_beta1 * scaled)        # Chen et al., arXiv 2302.06675
            m = beta2 * m + one_minus_beta2 * scaled
            master = master - (step + decay * master)
    SGD     g = scaled + decay * master                                          # torch.optim.SGD: decay in the gradient
            b = momentum * b + g                                                 # left out where momentum is 0
            master = master - step_size * (b or g)
    Muon    m = momentum * m + one_minus_momentum * scaled                       # torch.optim.Muon, Nesterov, in two rules
            grad = bf16(one_minus_momentum * scaled + momentum * m)              # written over the gradient; no master
            master = master - (step_size * grad + decay * master)                # grad: what the device has made of it

AdamW is Loshchilov & Hutter's with the bias corrections folded into two numbers. Decay and update are summed before they meet the
master: one rounding of the master instead of two, so a decay below half an ulp (lr 1e-6) is not lost beside a larger update.
Field order is that of the arrays of numbers in C++. Checked by ``tests/optim/test_formats.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWScalars:
    """The fp32 numbers of one update; field order is the struct of ``native/adamw.cpp``."""

    grad_scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    rsqrt_bias_correction2: float
    eps: float
    step_size: float
    decay: float

    @classmethod
    def of(
        cls, *, lr: float, step: int, grad_scale: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> AdamWScalars:
        """Of step number ``step`` (from 1)."""
        assert step >= 1, "optimizer steps are counted from 1"
        beta1, beta2 = betas
        return cls(
            grad_scale=grad_scale,
            beta1=beta1,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            rsqrt_bias_correction2=1.0 / math.sqrt(1.0 - beta2**step),
            eps=eps,
            step_size=lr / (1.0 - beta1**step),
            decay=lr * weight_decay,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LionScalars:
    """The fp32 numbers of one update."""

    grad_scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdScalars:
    """The fp32 numbers of one update; ``decay`` is added to the gradient, as torch does."""

    grad_scale: float
    momentum: float
    step_size: float
    decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumScalars:
    """The fp32 numbers of the first half of a Muon update: gradient and momentum alone are read and written."""

    grad_scale: float
    momentum: float
    one_minus_momentum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DescentScalars:
    """Of the second half, which keeps no moment."""

    step_size: float
    decay: float


Rule = AdamWScalars | LionScalars | SgdScalars | MomentumScalars | DescentScalars
RULES: tuple[type[Rule], ...] = (AdamWScalars, LionScalars, SgdScalars, MomentumScalars, DescentScalars)
"""In the order of ``enum Rule`` in ``native/formats.cpp``."""


def update(rule: Rule, master: Tensor, grad: Tensor, first: Tensor | None, second: Tensor | None) -> None:
    """``master``, ``grad`` and moments [n] fp32: all in place but ``grad``, which ``MomentumScalars`` alone writes."""
    if isinstance(rule, DescentScalars):
        master.sub_(grad * rule.step_size + master * rule.decay)
        return
    scaled = grad * rule.grad_scale
    if isinstance(rule, AdamWScalars):
        assert first is not None and second is not None
        _adamw(rule, master, scaled, first, second)
    elif isinstance(rule, LionScalars):
        assert first is not None
        blend = first * rule.beta1 + scaled * rule.one_minus_beta1
        step = torch.where(blend > 0, rule.step_size, torch.where(blend < 0, -rule.step_size, blend + 0.0))  # a NaN stays one
        first.copy_(without_denormals(first * rule.beta2 + scaled * rule.one_minus_beta2))
        master.sub_(step + master * rule.decay)
    elif isinstance(rule, MomentumScalars):
        assert first is not None
        blend = scaled * rule.one_minus_momentum
        first.copy_(without_denormals(first * rule.momentum + blend))
        grad.copy_((blend + first * rule.momentum).to(torch.bfloat16))
    else:
        scaled = scaled + master * rule.decay
        if first is not None:
            scaled = without_denormals(first * rule.momentum + scaled)
            first.copy_(scaled)
        master.sub_(scaled * rule.step_size)


def _adamw(rule: AdamWScalars, master: Tensor, scaled: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    m = without_denormals(exp_avg * rule.beta1 + scaled * rule.one_minus_beta1)
    v = without_denormals(exp_avg_sq * rule.beta2 + scaled * rule.one_minus_beta2 * scaled)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    denominator = exact_sqrt(v) * rule.rsqrt_bias_correction2 + rule.eps
    master.sub_(m / denominator * rule.step_size + master * rule.decay)


def exact_sqrt(values: Tensor) -> Tensor:
    """The correctly rounded fp32 root, as processors give it; torch's own may come from a library that is one ulp off.

    Through fp64 the rounding is right even if that root is an ulp off: no fp32 root lies within 2**-50 of a rounding boundary.
    """
    # TRAP: plain sqrt differs in 1 of some 400 values with MKL (tests/optim/test_kernels.py)
    return values.to(torch.float64).sqrt().to(torch.float32)


def without_denormals(values: Tensor) -> Tensor:
    return torch.where(values.abs() < SMALLEST_NORMAL, 0.0, values)
