"""Adafactor's step for planes on a CUDA device: seven Triton launches a parameter, the same bits as the CPU's.

What a parameter needs between them is a few numbers a row and a column. Checked by ``tests/gpu/test_device_formats.py`` against
the CPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.optim.factored import TILE_COLUMNS, TILE_NUMBERS, TILE_ROWS, Factored, FactoredScalars
from layerferry.optim.kernels import MASTERS, kept_bits
from layerferry.optim.reference_factored import ReferenceFactored
from layerferry.optim.rounding import signed

ROWS, COLUMNS, BLOCK, BLOCKS = 16, 32, 1024, 8
"""Of one program: rows; columns; numbers; blocks of random numbers."""


class TritonFactored:
    """``FactoredKernels`` for CUDA tensors."""

    def __init__(self, run: Callable[[Callable[[], None], Callable[[], None]], None]) -> None:
        """``run(launch, instead)``: ``launch``, or ``instead`` where Triton cannot be built."""
        self._run, self._reference = run, ReferenceFactored()

    def step(self, parameters: Sequence[Factored], scalars: FactoredScalars, *, threads: int) -> None:
        for one in parameters:
            self._run(
                lambda one=one: _launch(one, scalars),  # type: ignore[misc]
                lambda one=one: self._reference.step([one], scalars, threads=threads),  # type: ignore[misc]
            )


def _launch(parameter: Factored, scalars: FactoredScalars) -> None:
    kernels = _kernels()
    grad, matrices, height, width = parameter.grad, parameter.matrices, parameter.height, parameter.width
    num_rows, numel, is_matrix = matrices * height, grad.numel(), parameter.columns.numel() > 0
    exact: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}
    shared = {"grad_scale": scalars.grad_scale, "eps": scalars.eps}
    decays = {"beta2": scalars.beta2, "one_minus_beta2": 1.0 - scalars.beta2}
    by_row, by_column, row_factors, column_factors, factor = _scratch(grad, num_rows, matrices * width)

    def sums_by_row(of_update: bool) -> None:
        operands = (grad, row_factors, column_factors, by_row, num_rows, height, width)
        levels = _levels(TILE_COLUMNS)
        kernels.sums_by_row[(-(-num_rows // ROWS),)](*operands, **shared, OF_UPDATE=of_update, ROWS=ROWS, LEVELS=levels, **exact)

    kernels.sums_by_column[(-(-width // COLUMNS), matrices)](
        grad, by_column, height, width, **shared, COLUMNS=COLUMNS, LEVELS=_levels(TILE_ROWS), **exact
    )
    if is_matrix:
        sums_by_row(of_update=False)
        kernels.take_rows[(matrices,)](
            parameter.rows,
            by_row,
            row_factors,
            height,
            float(width),
            float(height),
            **decays,
            LEVELS=_levels(TILE_NUMBERS),
            **exact,
        )
    else:
        row_factors.fill_(1.0)
    moments, divisor = (parameter.columns, float(height)) if is_matrix else (parameter.rows, 1.0)
    kernels.take_columns[(-(-matrices * width // BLOCK),)](
        moments, by_column, column_factors, matrices * width, divisor, **decays, BLOCK=BLOCK, **exact
    )
    sums_by_row(of_update=True)
    kernels.clipped[(1,)](
        by_row, factor, num_rows, float(numel), scalars.clip_threshold, scalars.lr, LEVELS=_levels(TILE_NUMBERS), **exact
    )
    kernels.subtract[(-(-numel // (BLOCKS * BLOCK_ELEMENTS)),)](
        parameter.weight.view(torch.int16) if parameter.weight.dtype == torch.bfloat16 else parameter.weight,
        grad if parameter.residue is None else parameter.residue,
        *(grad, row_factors, column_factors, factor, numel, parameter.start // BLOCK_ELEMENTS, height, width),
        *(signed(scalars.rounding.key_low), signed(scalars.rounding.key_high), scalars.grad_scale, parameter.decay),
        MASTER=MASTERS.index(kept_bits(parameter)),
        ROWS=BLOCKS,
        BLOCK=BLOCK_ELEMENTS,
        **exact,
    )


def _scratch(grad: Tensor, num_rows: int, num_columns: int) -> list[Tensor]:
    """Sums and factors of rows and columns, and the factor of the update; fp32 beside ``grad``."""
    sizes = (num_rows, num_columns, num_rows, num_columns, 1)
    return [torch.empty(size, dtype=torch.float32, device=grad.device) for size in sizes]


def _levels(tile: int) -> int:
    return tile.bit_length() - 1


def _kernels() -> Any:
    from layerferry.optim import triton_factored

    return triton_factored
