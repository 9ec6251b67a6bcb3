"""SGD with momentum: ``torch.optim.SGD``, decay in the gradient, one moment or none; the arithmetic is in ``rules.py``.
Checked by ``tests/optim/test_lion_sgd.py``.
"""

from __future__ import annotations

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError
from layerferry.optim.base import StepHyper
from layerferry.optim.formats import FormattedOptimizer, StateFormat
from layerferry.optim.kernels import Kernels
from layerferry.optim.rules import SgdScalars

MOMENTUM = "momentum_buffer"


class SGD(FormattedOptimizer):
    """An ``Optimizer``. Without momentum it keeps nothing."""

    def __init__(
        self,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        state_format: StateFormat | None = None,
        seed: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(weight_decay=weight_decay, state_format=state_format, seed=seed, kernels=kernels)
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"optim_args: momentum={momentum} is outside [0, 1)")
        self.momentum = momentum
        self.moments = (MOMENTUM,) if momentum else ()

    @classmethod
    def of(cls, config: OptimConfig, *, state_format: StateFormat | None = None, seed: int = 0) -> SGD:
        return cls(momentum=config.momentum or 0.0, weight_decay=config.weight_decay, state_format=state_format, seed=seed)

    def rule(self, hyper: StepHyper, *, decays: bool) -> SgdScalars:
        return SgdScalars(
            grad_scale=hyper.grad_scale,
            momentum=self.momentum,
            step_size=hyper.lr,
            decay=self.weight_decay if decays else 0.0,
        )
