"""Adafactor in plain torch: the meaning of ``native/adafactor.cpp`` and ``triton_factored.py``.

Elementwise operations only, in whole tiles of rows so that temporaries stay small, and sums as trees of elementwise sums: so
neither torch's threads nor the device change a bit. ``threads`` is torch's own affair and ignored here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from layerferry.layout import BLOCK_ELEMENTS, round_up
from layerferry.optim.factored import TILE_COLUMNS, TILE_NUMBERS, TILE_ROWS, Factored, FactoredScalars
from layerferry.optim.masters import load_master, store_master
from layerferry.optim.rounding import random_words
from layerferry.optim.rules import exact_sqrt

CHUNK_ELEMENTS = 1 << 20
"""Of a matrix at a time, about: temporaries of some MiB."""


class ReferenceFactored:
    """``FactoredKernels`` in torch, on any device."""

    def step(self, parameters: Sequence[Factored], scalars: FactoredScalars, *, threads: int) -> None:
        for parameter in parameters:
            row_factor, column_factor = _factors(parameter, scalars, *_sums(parameter, scalars))
            square = tiled_sum(_squares(parameter, scalars, row_factor, column_factor).view(-1), 0, TILE_NUMBERS)
            size = exact_sqrt(square / _number(parameter, parameter.grad.numel())) / _number(parameter, scalars.clip_threshold)
            factor = size.clamp(min=1.0).reciprocal() * scalars.lr
            _subtract(parameter, scalars, row_factor, column_factor, factor)


def _sums(parameter: Factored, scalars: FactoredScalars) -> tuple[Tensor, Tensor]:
    """Of squared gradients, [matrices, height] and [matrices, width] fp32."""
    by_row = _zeros(parameter, parameter.matrices, parameter.height)
    by_column = _zeros(parameter, parameter.matrices, parameter.width)
    for matrix, start, stop in _chunks(parameter):
        grad = _grad(parameter, scalars, matrix, start, stop)
        squared = grad * grad + scalars.eps
        by_row[matrix, start:stop] = tiled_sum(squared, 1, TILE_COLUMNS)
        for tile in torch.split(squared, TILE_ROWS):
            by_column[matrix] += tree_sum(tile, 0, TILE_ROWS)
    return by_row, by_column


def _factors(parameter: Factored, scalars: FactoredScalars, by_row: Tensor, by_column: Tensor) -> tuple[Tensor, Tensor]:
    """Of the gradient in the update, [matrices, height] and [matrices, width], after taking the sums into the moments."""
    rows, columns, beta2 = parameter.rows, parameter.columns, scalars.beta2
    if not columns.numel():
        rows.copy_(rows * beta2 + by_column * (1.0 - beta2))  # of one row: the squares themselves
        return torch.ones_like(rows[:, :1]), exact_sqrt(rows).reciprocal()
    width, height = _number(parameter, parameter.width), _number(parameter, parameter.height)
    rows.copy_(rows * beta2 + by_row / width * (1.0 - beta2))
    columns.copy_(columns * beta2 + by_column / height * (1.0 - beta2))
    means = tiled_sum(rows, 1, TILE_NUMBERS) / height
    return exact_sqrt(rows / means[:, None]).reciprocal(), exact_sqrt(columns).reciprocal()


def _squares(parameter: Factored, scalars: FactoredScalars, row_factor: Tensor, column_factor: Tensor) -> Tensor:
    """Of the whole update, by row: [matrices, height] fp32."""
    by_row = _zeros(parameter, parameter.matrices, parameter.height)
    for matrix, start, stop in _chunks(parameter):
        update = _update(parameter, scalars, row_factor, column_factor, matrix, start, stop)
        by_row[matrix, start:stop] = tiled_sum(update * update, 1, TILE_COLUMNS)
    return by_row


def _subtract(parameter: Factored, scalars: FactoredScalars, row_factor: Tensor, column_factor: Tensor, factor: Tensor) -> None:
    """The update times ``factor`` [1] fp32, and the decay, from the master."""
    for matrix, start, stop in _chunks(parameter):
        update = _update(parameter, scalars, row_factor, column_factor, matrix, start, stop) * factor
        own = _own(parameter, matrix, start, stop)
        residue = None if parameter.residue is None else parameter.residue[own]
        master = load_master(parameter.weight[own], residue)
        master = master - (update.view(-1) + master * parameter.decay)
        store_master(master, parameter.weight[own], residue, _random(parameter, scalars, own))


def _number(parameter: Factored, value: float) -> Tensor:
    """[] fp32 at the parameter's place, to divide by."""
    # TRAP: by a Python number, torch on CUDA multiplies with its reciprocal instead, which rounds twice
    return torch.full((), value, dtype=torch.float32, device=parameter.grad.device)


def _zeros(parameter: Factored, *shape: int) -> Tensor:
    # TRAP: another thread that builds a model has set another default type (tests/optim/test_adafactor.py)
    return torch.zeros(shape, dtype=torch.float32, device=parameter.grad.device)


def _chunks(parameter: Factored) -> Iterator[tuple[int, int, int]]:
    """(matrix, first row, row behind the last) of whole tiles."""
    rows = round_up(max(CHUNK_ELEMENTS // parameter.width, 1), TILE_ROWS)
    for matrix in range(parameter.matrices):
        for start in range(0, parameter.height, rows):
            yield matrix, start, min(start + rows, parameter.height)


def _own(parameter: Factored, matrix: int, start: int, stop: int) -> slice:
    """The elements of some rows."""
    begin, end = ((matrix * parameter.height + row) * parameter.width for row in (start, stop))
    return slice(begin, end)


def _grad(parameter: Factored, scalars: FactoredScalars, matrix: int, start: int, stop: int) -> Tensor:
    """[rows, width] fp32, scaled."""
    return parameter.grad[_own(parameter, matrix, start, stop)].view(-1, parameter.width).float() * scalars.grad_scale


def _update(
    parameter: Factored, scalars: FactoredScalars, row_factor: Tensor, column_factor: Tensor, matrix: int, start: int, stop: int
) -> Tensor:
    """[rows, width] fp32, before it is clipped."""
    return row_factor[matrix, start:stop, None] * column_factor[matrix] * _grad(parameter, scalars, matrix, start, stop)


def _random(parameter: Factored, scalars: FactoredScalars, own: slice) -> Tensor:
    """The words of the elements ``own``, which need not be whole blocks."""
    begin, end = parameter.start + own.start, parameter.start + own.stop
    first, last = begin // BLOCK_ELEMENTS * BLOCK_ELEMENTS, round_up(end, BLOCK_ELEMENTS)
    return random_words(scalars.rounding, first, last - first, parameter.weight.device)[begin - first : end - first]


def tiled_sum(values: Tensor, dim: int, tile: int) -> Tensor:
    """The sum over ``dim``: trees of ``tile`` numbers, added in their order."""
    first, *others = (tree_sum(one, dim, tile) for one in torch.split(values, tile, dim))
    for other in others:
        first = first + other
    return first


def tree_sum(values: Tensor, dim: int, tile: int) -> Tensor:
    """The sum over ``dim`` by halving, as if zeros filled it up to ``tile``: elementwise sums only, one order everywhere."""
    half = tile // 2
    while half:
        rest = values.shape[dim] - half
        if rest > 0:
            low = values.narrow(dim, 0, half)
            added = low.narrow(dim, 0, rest) + values.narrow(dim, half, rest)
            values = torch.cat([added, low.narrow(dim, rest, half - rest)], dim)
        half //= 2
    return values.squeeze(dim)
