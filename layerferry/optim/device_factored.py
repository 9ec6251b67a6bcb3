"""Adafactor's step for planes on a CUDA device: seven Triton launches a parameter, the same bits as the CPU's.

What a parameter needs between them is a few numbers a row and a column. Checked by ``tests/gpu/test_device_formats.py`` against
the CPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.optim.factored import TILE_COLUMNS, TILE_NUMBERS, TILE_ROWS, Factored, FactoredScalars
from layerferry.optim.kernels import MASTERS, kept_bits
from layerferry.optim.reference_factored import ReferenceFactored
from layerferry.optim.rounding import signed

ROWS, COLUMNS, BLOCK, BLOCKS = 16, 32, 1024, 8
"""Of one program: rows; columns; numbers; blocks of random numbers."""
EXACT: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}


class TritonFactored:
    """``FactoredKernels`` for CUDA tensors."""

    def __init__(self, launched: Callable[[Callable[[], None]], bool]) -> None:
        """``launched(launch)``: whether that was possible; not where Triton cannot be built."""
        self._launched, self._reference = launched, ReferenceFactored()

    def step(self, parameters: Sequence[Factored], scalars: FactoredScalars, *, threads: int) -> None:
        for one in parameters:
            launches = _Launches(one, scalars)
            if self._launched(launches.sum):
                # TRAP: from here on moments change, so that what fails must end the run (tests/optim/test_device_kernels.py)
                launches.take()
            else:
                self._reference.step([one], scalars, threads=threads)


class _Launches:
    """Of one parameter and step. Sums and factors of rows and columns, and the factor of the update, are fp32 beside its
    gradient."""

    def __init__(self, parameter: Factored, scalars: FactoredScalars) -> None:
        self._parameter, self._scalars = parameter, scalars
        matrices, self._height, self._width = parameter.matrices, parameter.height, parameter.width
        self._num_rows, self._num_columns = matrices * self._height, matrices * self._width
        self._is_matrix = parameter.columns.numel() > 0

    def sum(self) -> None:
        """Of squared gradients; no plane is written."""
        parameter, self._kernels = self._parameter, _kernels()
        sizes = (self._num_rows, self._num_columns, self._num_rows, self._num_columns, 1)
        scratch = [torch.empty(size, dtype=torch.float32, device=parameter.grad.device) for size in sizes]
        self._by_row, self._by_column, self._row_factors, self._column_factors, self._factor = scratch
        self._kernels.sums_by_column[(parameter.matrices, -(-self._width // COLUMNS))](
            *(parameter.grad, self._by_column, self._height, self._width),
            **self._shared,
            COLUMNS=COLUMNS,
            LEVELS=_levels(TILE_ROWS),
            **EXACT,
        )
        if self._is_matrix:
            self._sum_by_row(of_update=False)

    def take(self) -> None:
        """The moments take the sums, and the weights the update."""
        parameter, scalars, kernels = self._parameter, self._scalars, self._kernels
        height, width, numel = self._height, self._width, parameter.grad.numel()
        decays = {"beta2": scalars.beta2, "one_minus_beta2": 1.0 - scalars.beta2}
        if self._is_matrix:
            kernels.take_rows[(parameter.matrices,)](
                *(parameter.rows, self._by_row, self._row_factors, height, float(width), float(height)),
                **decays,
                LEVELS=_levels(TILE_NUMBERS),
                **EXACT,
            )
        else:
            self._row_factors.fill_(1.0)
        moments, divisor = (parameter.columns, float(height)) if self._is_matrix else (parameter.rows, 1.0)
        kernels.take_columns[(-(-self._num_columns // BLOCK),)](
            *(moments, self._by_column, self._column_factors, self._num_columns, divisor), **decays, BLOCK=BLOCK, **EXACT
        )
        self._sum_by_row(of_update=True)
        kernels.clipped[(1,)](
            *(self._by_row, self._factor, self._num_rows, float(numel), scalars.clip_threshold, scalars.lr),
            LEVELS=_levels(TILE_NUMBERS),
            **EXACT,
        )
        kernels.subtract[(-(-numel // (BLOCKS * BLOCK_ELEMENTS)),)](
            parameter.weight.view(torch.int16) if parameter.weight.dtype == torch.bfloat16 else parameter.weight,
            parameter.grad if parameter.residue is None else parameter.residue,
            *(parameter.grad, self._row_factors, self._column_factors, self._factor),
            *(numel, parameter.start // BLOCK_ELEMENTS, height, width),
            *(signed(scalars.rounding.key_low), signed(scalars.rounding.key_high), scalars.grad_scale, parameter.decay),
            MASTER=MASTERS.index(kept_bits(parameter)),
            ROWS=BLOCKS,
            BLOCK=BLOCK_ELEMENTS,
            **EXACT,
        )

    def _sum_by_row(self, *, of_update: bool) -> None:
        self._kernels.sums_by_row[(-(-self._num_rows // ROWS),)](
            *(self._parameter.grad, self._row_factors, self._column_factors, self._by_row),
            *(self._num_rows, self._height, self._width),
            **self._shared,
            OF_UPDATE=of_update,
            ROWS=ROWS,
            LEVELS=_levels(TILE_COLUMNS),
            **EXACT,
        )

    @property
    def _shared(self) -> dict[str, float]:
        return {"grad_scale": self._scalars.grad_scale, "eps": self._scalars.eps}


def _levels(tile: int) -> int:
    return tile.bit_length() - 1


def _kernels() -> Any:
    from layerferry.optim import triton_factored

    return triton_factored
