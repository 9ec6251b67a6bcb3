"""Lion: the sign of a blend of momentum and gradient, one moment. Chen et al., Symbolic Discovery of Optimization Algorithms
(arXiv 2302.06675); the arithmetic is in ``rules.py``. Weight decay is decoupled. Checked by ``tests/optim/test_lion_sgd.py``.
"""

from __future__ import annotations

from layerferry.config import OptimConfig
from layerferry.optim.base import EXP_AVG, StepHyper
from layerferry.optim.formats import FormattedOptimizer, StateFormat, check_betas
from layerferry.optim.kernels import Kernels
from layerferry.optim.rules import LionScalars


class Lion(FormattedOptimizer):
    """An ``Optimizer``."""

    moments = (EXP_AVG,)

    def __init__(
        self,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        state_format: StateFormat | None = None,
        seed: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(weight_decay=weight_decay, state_format=state_format, seed=seed, kernels=kernels)
        check_betas(betas)
        self.betas = betas

    @classmethod
    def of(cls, config: OptimConfig, *, state_format: StateFormat | None = None, seed: int = 0) -> Lion:
        """With Adam's betas, as the Hugging Face Trainer does."""
        betas = (config.adam_beta1, config.adam_beta2)
        return cls(betas=betas, weight_decay=config.weight_decay, state_format=state_format, seed=seed)

    def rule(self, hyper: StepHyper, *, decays: bool) -> LionScalars:
        beta1, beta2 = self.betas
        return LionScalars(
            grad_scale=hyper.grad_scale,
            beta1=beta1,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            step_size=hyper.lr,
            decay=hyper.lr * self.weight_decay if decays else 0.0,
        )
