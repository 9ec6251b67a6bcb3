"""Adafactor: a matrix's second moments as the outer product of a row and a column, next to no bytes of state.

Shazeer & Stern, Adafactor (arXiv 1804.04235), as the Hugging Face Trainer runs it: the learning rate of the run, no first moment,
no scaling by the parameter, beta2 growing with the step (1 - step**-0.8), the update of a parameter clipped to a root mean square
of 1. Vectors keep the whole second moment. Tensors of more than two dimensions (experts) are matrices of their last two.

The one pass of other rules cannot be: what a row and a column sum up must be known before the first element is updated, and the
clipping of the update before it is applied. So the gradient is read three times (sums; root mean square; update) and the weight
once: 14 bytes a parameter moved, half of AdamW's. The three passes are ``factored.py``'s, native or in torch; what is between
them, a number for each row and column, is torch here. Sums are trees by halving, so that neither threads nor the device change a
bit. Left out: threads within a chunk of ``CHUNK_ELEMENTS`` in the first pass, where a small matrix keeps one core busy. Checked
by ``tests/optim/test_adafactor.py`` against transformers' Adafactor, and native against torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from layerferry.config import OptimConfig
from layerferry.layout import COLUMN_PLANE, ROW_PLANE, WEIGHT, Layout, Plane, PlaneSpec
from layerferry.optim.base import StepHyper
from layerferry.optim.device_kernels import device_kernels
from layerferry.optim.factored import Factored, FactoredKernels
from layerferry.optim.formats import StateFormat, check_decay
from layerferry.optim.kernels import Kernels
from layerferry.optim.load import load_kernels
from layerferry.optim.reference_factored import tree_sum
from layerferry.optim.rounding import Rounding
from layerferry.optim.rules import exact_sqrt

ROWS, COLUMNS = "exp_avg_sq_row", "exp_avg_sq_col"
CHUNK_ELEMENTS = 1 << 20
"""Of a matrix at a time: temporaries of a few MiB in torch. Fixed, because sums are taken chunk by chunk."""


class Adafactor:
    """An ``Optimizer``. Holds no state: all of it is in planes and ``StepHyper``."""

    def __init__(
        self,
        *,
        decay_rate: float = -0.8,
        eps: float = 1e-30,
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        state_format: StateFormat | None = None,
        seed: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        """``kernels`` None: the native ones, or the torch reference where they cannot be built."""
        check_decay(weight_decay)
        self.format = state_format or StateFormat()
        self.decay_rate, self.eps, self.clip_threshold, self.weight_decay = decay_rate, eps, clip_threshold, weight_decay
        self._seed = seed
        self._host_kernels = load_kernels() if kernels is None else kernels
        self._device_kernels = device_kernels()

    @classmethod
    def of(cls, config: OptimConfig, *, state_format: StateFormat | None = None, seed: int = 0) -> Adafactor:
        return cls(weight_decay=config.weight_decay, state_format=state_format, seed=seed)

    @property
    def state_planes(self) -> Mapping[str, PlaneSpec]:
        return {**self.format.planes(()), ROWS: ROW_PLANE, COLUMNS: COLUMN_PLANE}

    def bytes_per_param(self) -> float:
        """Next to nothing: how much is a matter of shapes."""
        return 0.0

    def step(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See ``Optimizer.step``."""
        kernels = self._host_kernels if planes[WEIGHT].buffer.device.type == "cpu" else self._device_kernels
        rounding = Rounding.of(seed=self._seed, step=hyper.step, stream=hyper.stream)
        for entry in (entry for entry in layout.entries if entry.trained):
            parameter = Factored.of(planes, entry, chunk_elements=CHUNK_ELEMENTS, grad_scale=hyper.grad_scale, rounding=rounding)
            decay = hyper.lr * self.weight_decay if entry.decays else 0.0
            factors = self._factors(
                kernels.factored, parameter, planes[ROWS].view(entry), planes[COLUMNS].view(entry), hyper, threads
            )
            self._apply(kernels.factored, parameter, *factors, hyper, decay, threads)

    def _factors(
        self, kernels: FactoredKernels, parameter: Factored, rows: Tensor, columns: Tensor, hyper: StepHyper, threads: int
    ) -> tuple[Tensor, Tensor]:
        """Of the gradient in the update, by row and by column, after taking the gradient into ``rows`` and ``columns``.

        ``rows`` [matrices, height], ``columns`` [matrices, width] fp32; of a vector [1, n] and [1, 0].
        """
        beta2 = 1.0 - hyper.step**self.decay_rate
        by_row, by_column = kernels.sums(parameter, eps=self.eps, threads=threads)
        if not columns.numel():
            rows.copy_(rows * beta2 + by_column * (1.0 - beta2))  # of one row: the squares themselves
            return torch.ones_like(rows[:, :1]), 1.0 / exact_sqrt(rows)
        rows.copy_(rows * beta2 + by_row / parameter.width * (1.0 - beta2))
        columns.copy_(columns * beta2 + by_column / parameter.height * (1.0 - beta2))
        means = tree_sum(rows, 1) / parameter.height
        return 1.0 / exact_sqrt(rows / means[:, None]), 1.0 / exact_sqrt(columns)

    def _apply(
        self,
        kernels: FactoredKernels,
        parameter: Factored,
        row_factor: Tensor,
        column_factor: Tensor,
        hyper: StepHyper,
        decay: float,
        threads: int,
    ) -> None:
        """The update, clipped to a root mean square of ``clip_threshold``."""
        square = kernels.square(parameter, row_factor, column_factor, threads=threads)
        size = exact_sqrt(square / parameter.grad.numel()) / self.clip_threshold
        factor = hyper.lr / size.clamp(min=1.0)
        kernels.subtract(parameter, row_factor, column_factor, factor, decay=decay, threads=threads)
