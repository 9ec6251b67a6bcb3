"""Adafactor: a matrix's second moments as the outer product of a row and a column, next to no bytes of state.

Shazeer & Stern, Adafactor (arXiv 1804.04235), as the Hugging Face Trainer runs it: the learning rate of the run, no first moment,
no scaling by the parameter, beta2 growing with the step (1 - step**-0.8), the update of a parameter clipped to a root mean square
of 1. Vectors keep the whole second moment. Tensors of more than two dimensions (experts) are matrices of their last two.

The one pass of other rules cannot be: what a row and a column sum up must be known before the first element is updated, and the
clipping of the update before it is applied. So the gradient is read three times (sums; root mean square; update) and the weight
once: 14 bytes a parameter moved, half of AdamW's. Everything is elementwise torch in chunks of rows, and sums are trees of
elementwise sums, so that neither threads nor the device change a bit. Left out: a kernel of its own (torch's temporaries make it
several times slower than AdamW's). Checked by ``tests/optim/test_adafactor.py`` against transformers' Adafactor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from layerferry.config import OptimConfig
from layerferry.layout import BLOCK_ELEMENTS, COLUMN_PLANE, GRAD, RESIDUE, ROW_PLANE, WEIGHT, Entry, Layout, Plane, PlaneSpec
from layerferry.optim.base import StepHyper
from layerferry.optim.formats import StateFormat, check_decay
from layerferry.optim.reference import load_master, store_master
from layerferry.optim.rounding import Rounding, random_words
from layerferry.optim.rules import exact_sqrt

ROWS, COLUMNS = "exp_avg_sq_row", "exp_avg_sq_col"
CHUNK_ELEMENTS = 1 << 20
"""Of a matrix at a time: temporaries of a few MiB. Fixed, because sums are taken chunk by chunk."""


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
    ) -> None:
        check_decay(weight_decay)
        self.format = state_format or StateFormat()
        self.decay_rate, self.eps, self.clip_threshold, self.weight_decay = decay_rate, eps, clip_threshold, weight_decay
        self._seed = seed

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
        """See ``Optimizer.step``; ``threads`` are torch's own affair."""
        rounding = Rounding.of(seed=self._seed, step=hyper.step, stream=hyper.stream)
        for entry in (entry for entry in layout.entries if entry.trained):
            self._step(_Parameter(planes, entry, rounding), planes[ROWS].view(entry), planes[COLUMNS].view(entry), hyper)

    def _step(self, parameter: _Parameter, rows: Tensor, columns: Tensor, hyper: StepHyper) -> None:
        """``rows`` [matrices, R], ``columns`` [matrices, C] fp32; of a vector [1, n] and [1, 0]."""
        beta2 = 1.0 - hyper.step**self.decay_rate
        if len(parameter.entry.shape) < 2:
            grad = parameter.grad(0, 0, 1, hyper.grad_scale)
            rows.copy_(rows * beta2 + (grad * grad + self.eps) * (1.0 - beta2))
            row_factor, column_factor = torch.ones_like(rows[:, :1]), 1.0 / exact_sqrt(rows)
        else:
            for matrix in range(rows.shape[0]):
                row_sums, column_sums = self._sums(parameter, matrix, hyper.grad_scale)
                rows[matrix] = rows[matrix] * beta2 + row_sums / columns.shape[1] * (1.0 - beta2)
                columns[matrix] = columns[matrix] * beta2 + column_sums / rows.shape[1] * (1.0 - beta2)
            means = tree_sum(rows, 1) / rows.shape[1]
            row_factor, column_factor = 1.0 / exact_sqrt(rows / means[:, None]), 1.0 / exact_sqrt(columns)
        squares = parameter.zeros(1)
        for matrix, start, stop in parameter.chunks():
            update = parameter.update(matrix, start, stop, hyper.grad_scale, row_factor, column_factor)
            squares += tree_sum(tree_sum(update * update, 1), 0)
        size = exact_sqrt(squares / parameter.entry.numel) / self.clip_threshold
        factor = hyper.lr / size.clamp(min=1.0)
        decay = hyper.lr * self.weight_decay if parameter.entry.decays else 0.0
        for matrix, start, stop in parameter.chunks():
            update = parameter.update(matrix, start, stop, hyper.grad_scale, row_factor, column_factor)
            parameter.subtract(matrix, start, update * factor, decay)

    def _sums(self, parameter: _Parameter, matrix: int, grad_scale: float) -> tuple[Tensor, Tensor]:
        """Of the squared gradient of one matrix: by row [R], by column [C]."""
        by_row, by_column = [], parameter.zeros(parameter.width)
        for number, start, stop in parameter.chunks():
            if number == matrix:
                grad = parameter.grad(matrix, start, stop, grad_scale)
                squared = grad * grad + self.eps
                by_row.append(tree_sum(squared, 1))
                by_column += tree_sum(squared, 0)
        return torch.cat(by_row), by_column


class _Parameter:
    """One parameter's planes as [matrices, height, width]; a vector is one row."""

    def __init__(self, planes: Mapping[str, Plane], entry: Entry, rounding: Rounding) -> None:
        self.entry, self._rounding = entry, rounding
        self.height, self.width = entry.shape[-2:] if len(entry.shape) > 1 else (1, entry.numel)
        self._weight, self._grad = planes[WEIGHT].view(entry).view(-1), planes[GRAD].view(entry).view(-1)
        residue = planes.get(RESIDUE)
        kept = residue is not None and entry.dtype in residue.sections
        self._residue = residue.view(entry).view(-1) if residue is not None and kept else None
        self.device = self._weight.device

    def zeros(self, count: int) -> Tensor:
        # TRAP: another thread that builds a model has set another default type (tests/optim/test_adafactor.py)
        return torch.zeros(count, dtype=torch.float32, device=self.device)

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """(matrix, first row, row behind the last) in a fixed order."""
        rows = max(1, CHUNK_ELEMENTS // self.width)
        for matrix in range(self.entry.numel // (self.height * self.width)):
            for start in range(0, self.height, rows):
                yield matrix, start, min(start + rows, self.height)

    def grad(self, matrix: int, start: int, stop: int, grad_scale: float) -> Tensor:
        """[rows, width] fp32, times the clip coefficient."""
        begin, end = ((matrix * self.height + row) * self.width for row in (start, stop))
        return self._grad[begin:end].view(-1, self.width).float() * grad_scale

    def update(self, matrix: int, start: int, stop: int, grad_scale: float, row_factor: Tensor, column_factor: Tensor) -> Tensor:
        """[rows, width] fp32: the gradient over the root of its second moment."""
        grad = self.grad(matrix, start, stop, grad_scale)
        return row_factor[matrix, start:stop, None] * column_factor[matrix] * grad

    def subtract(self, matrix: int, start: int, update: Tensor, decay: float) -> None:
        """From the master, rounded as its format is."""
        begin = (matrix * self.height + start) * self.width
        own = slice(begin, begin + update.numel())
        residue = None if self._residue is None else self._residue[own]
        master = load_master(self._weight[own], residue)
        master = master - (update.view(-1) + master * decay)
        store_master(master, self._weight[own], residue, self._random(own))

    def _random(self, own: slice) -> Tensor:
        """The words of the elements ``own``, which need not be whole blocks."""
        begin, end = self.entry.offset + own.start, self.entry.offset + own.stop
        first, last = begin // BLOCK_ELEMENTS * BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        return random_words(self._rounding, first, last - first, self.device)[begin - first : end - first]


def tree_sum(values: Tensor, dim: int) -> Tensor:
    """The sum over ``dim`` by halving: elementwise sums only, so it has one order wherever it runs."""
    count = values.shape[dim]
    while count > 1:
        half = count // 2
        odd = values.narrow(dim, 2 * half, 1) if count % 2 else None
        values = values.narrow(dim, 0, half) + values.narrow(dim, half, half)
        if odd is not None:
            values.narrow(dim, 0, 1).add_(odd)
        count = half
    return values.squeeze(dim)
