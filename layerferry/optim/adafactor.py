"""Adafactor: a matrix's second moments as the outer product of a row and a column, next to no bytes of state.

Shazeer & Stern, Adafactor (arXiv 1804.04235), as the Hugging Face Trainer runs it: the learning rate of the run, no first moment,
no scaling by the parameter, beta2 growing with the step (1 - step**-0.8), the update of a parameter clipped to a root mean square
of 1. Vectors keep the whole second moment. Tensors of more than two dimensions (experts) are matrices of their last two.

The one pass of other rules cannot be: what a row and a column sum up must be known before the first element is updated, and the
clipping of the update before it is applied. So the gradient is read three times (sums; root mean square; update) and the weight
once: 14 bytes a parameter moved, half of AdamW's. The step over a unit's parameters is ``factored.py``'s.
Checked by ``tests/optim/test_adafactor.py`` against transformers' Adafactor, and native against torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from layerferry.config import OptimConfig
from layerferry.layout import COLUMN_PLANE, GRAD, RESIDUE, ROW_PLANE, WEIGHT, Entry, Layout, Plane, PlaneSpec
from layerferry.optim.base import StepHyper
from layerferry.optim.device_kernels import device_kernels
from layerferry.optim.factored import Factored, FactoredScalars
from layerferry.optim.formats import StateFormat, check_decay
from layerferry.optim.kernels import Kernels
from layerferry.optim.load import load_kernels
from layerferry.optim.rounding import Rounding

ROWS, COLUMNS = "exp_avg_sq_row", "exp_avg_sq_col"


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
        scalars = FactoredScalars(
            lr=hyper.lr,
            beta2=1.0 - hyper.step**self.decay_rate,
            eps=self.eps,
            clip_threshold=self.clip_threshold,
            grad_scale=hyper.grad_scale,
            rounding=Rounding.of(seed=self._seed, step=hyper.step, stream=hyper.stream),
        )
        trained = [entry for entry in layout.entries if entry.trained]
        decay = hyper.lr * self.weight_decay
        parameters = [_parameter(planes, entry, decay if entry.decays else 0.0) for entry in trained]
        kernels.factored.step(parameters, scalars, threads=threads)


def _parameter(planes: Mapping[str, Plane], entry: Entry, decay: float) -> Factored:
    height, width = entry.shape[-2:] if len(entry.shape) > 1 else (1, entry.numel)
    residue = planes.get(RESIDUE)
    kept = residue is not None and entry.dtype in residue.sections
    return Factored(
        weight=planes[WEIGHT].view(entry).view(-1),
        residue=residue.view(entry).view(-1) if residue is not None and kept else None,
        grad=planes[GRAD].view(entry).view(-1),
        rows=planes[ROWS].view(entry),
        columns=planes[COLUMNS].view(entry),
        matrices=entry.numel // (height * width),
        height=height,
        width=width,
        start=entry.offset,
        decay=decay,
    )
