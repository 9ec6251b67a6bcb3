"""The seam under Adafactor: a unit's parameters as stacks of matrices, and one step over all of them, native or in torch.

What a row and a column of squared gradients sum up must be known before the first element is updated, and the mean square of a
parameter's whole update before it is applied. So there are three passes over gradients, with little between them::

    squared = scaled * scaled + eps                                  sums of it by row, and by column
    rows    = rows    * beta2 + by_row    / width  * (1 - beta2)     columns likewise; a vector is one row, and its
    columns = columns * beta2 + by_column / height * (1 - beta2)     squares themselves are what is kept, in ``rows``
    update  = 1 / sqrt(rows / mean(rows)) * 1 / sqrt(columns) * scaled          the sum of update * update
    factor  = lr / max(1, sqrt(that sum / elements) / clip_threshold)
    master  = master - (update * factor + master * decay)            rounded as its format is

``scaled`` is the gradient times ``grad_scale``; one fp32 rounding an operation. A sum is taken over tiles, each a tree by halving
that is filled up with zeros, and the tiles are added in their order: by row over ``TILE_COLUMNS``, by column over ``TILE_ROWS``,
and what rows have (their moments, their share of a square) over ``TILE_NUMBERS``. So nothing else decides the bits, and a tile is
what one program of a GPU holds.
Implementations: ``native_factored.py`` (C++, one call a unit), ``triton_factored.py`` (CUDA, seven launches a parameter),
``reference_factored.py`` (torch, any device); ``tests/optim/test_adafactor.py`` and ``tests/gpu/test_device_formats.py`` hold
them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from layerferry.optim.rounding import Rounding

TILE_COLUMNS, TILE_ROWS, TILE_NUMBERS = 128, 256, 1024
"""Powers of two; ``native/adafactor.cpp`` has them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factored:
    """One parameter as [matrices, height, width], its planes flat and all at one place; a vector is one row."""

    weight: Tensor  # [n] bf16, or fp32: the whole master
    residue: Tensor | None  # [n] int16 or int8; None: the weight is all
    grad: Tensor  # [n] bf16 or fp32; read only
    rows: Tensor  # [matrices, height] fp32: second moments; of a vector [1, n]
    columns: Tensor  # [matrices, width] fp32; of a vector [1, 0]
    matrices: int
    height: int
    width: int
    start: int
    """Place of the first element in its section, whole blocks: what random numbers are counted by."""
    decay: float
    """The share of the master that is taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredScalars:
    """What a step shares."""

    lr: float
    beta2: float
    eps: float
    clip_threshold: float
    grad_scale: float
    """The clip coefficient."""
    rounding: Rounding
    """Of this step: what masters' roundings are drawn from."""


class FactoredKernels(Protocol):
    """Adafactor over all trained parameters of a unit."""

    def step(self, parameters: Sequence[Factored], scalars: FactoredScalars, *, threads: int) -> None:
        """Moments and masters in place. Results do not depend on ``threads``."""
