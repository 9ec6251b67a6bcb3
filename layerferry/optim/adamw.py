"""AdamW on an exact fp32 master by default: 8 bytes of moments, decoupled weight decay, the clip coefficient in the same pass.

The meaning is that of ``torch.optim.AdamW``, its arithmetic is written down in ``rules.py``. Other formats of the state
(``formats.py``) change what is kept of the result, not the update. Planes in host memory go to the native kernels, planes on a
device to Triton's: the same bits (``tests/optim``, ``tests/gpu``).
"""

from __future__ import annotations

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError
from layerferry.optim.base import EXP_AVG, EXP_AVG_SQ, StepHyper
from layerferry.optim.formats import FormattedOptimizer, StateFormat, check_betas
from layerferry.optim.kernels import Kernels
from layerferry.optim.rules import SMALLEST_NORMAL, AdamWScalars


class AdamW(FormattedOptimizer):
    """An ``Optimizer``. Holds no state: two steps with the same planes and ``StepHyper`` give the same bits."""

    moments = (EXP_AVG, EXP_AVG_SQ)

    def __init__(
        self,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_format: StateFormat | None = None,
        seed: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        """``seed``: of stochastic rounding. ``kernels`` None: the native ones, or the torch reference where none can be built."""
        super().__init__(weight_decay=weight_decay, state_format=state_format, seed=seed, kernels=kernels)
        check_betas(betas)
        if not eps >= SMALLEST_NORMAL:  # padding is 0 / (0 + eps)
            raise ConfigError(
                f"adam_epsilon: {eps} is below {SMALLEST_NORMAL:.3e}: parameters without gradient would be divided by it"
            )
        self.betas = betas
        self.eps = eps

    @classmethod
    def of(cls, config: OptimConfig, *, state_format: StateFormat | None = None, seed: int = 0) -> AdamW:
        betas = (config.adam_beta1, config.adam_beta2)
        return cls(betas=betas, eps=config.adam_epsilon, weight_decay=config.weight_decay, state_format=state_format, seed=seed)

    def rule(self, hyper: StepHyper, *, decays: bool) -> AdamWScalars:
        return AdamWScalars.of(
            lr=hyper.lr,
            step=hyper.step,
            grad_scale=hyper.grad_scale,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay if decays else 0.0,
        )
