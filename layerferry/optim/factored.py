"""The seam under Adafactor: one parameter's planes as a stack of matrices, and the three passes over it, native or in torch.

What is small, a number for each row or column, is ``adafactor.py``'s own torch. What has the size of the parameter is here::

    sums       squared = scaled * scaled + eps; its sums by row, and by column
    square     update = row_factor * column_factor * scaled; the sum of update * update
    subtract   master = master - (update * factor + master * decay), rounded as its format is

``scaled`` is the gradient times ``grad_scale``; one fp32 rounding an operation. Sums are trees by halving; those by column
reach over a chunk of rows, and chunks are added in their order: the bits depend on ``chunk_rows`` and on nothing else.
Implementations: ``native_factored.py`` (C++), ``reference_factored.py`` (torch, any device); ``tests/optim/test_adafactor.py``
holds them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from layerferry.layout import GRAD, RESIDUE, WEIGHT, Entry, Plane
from layerferry.optim.rounding import Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Factored:
    """One parameter as [matrices, height, width], its planes flat and all at one place; a vector is one row."""

    weight: Tensor  # [n] bf16, or fp32: the whole master
    residue: Tensor | None  # [n] int16 or int8; None: the weight is all
    grad: Tensor  # [n] bf16 or fp32; read only
    matrices: int
    height: int
    width: int
    chunk_rows: int
    """Rows of a matrix whose sums by column are one tree."""
    start: int
    """Place of the first element in its section, whole blocks: what random numbers are counted by."""
    grad_scale: float
    """The clip coefficient."""
    rounding: Rounding
    """Of this step: what the master's rounding is drawn from."""

    @classmethod
    def of(
        cls, planes: Mapping[str, Plane], entry: Entry, *, chunk_elements: int, grad_scale: float, rounding: Rounding
    ) -> Factored:
        height, width = entry.shape[-2:] if len(entry.shape) > 1 else (1, entry.numel)
        residue = planes.get(RESIDUE)
        kept = residue is not None and entry.dtype in residue.sections
        return cls(
            weight=planes[WEIGHT].view(entry).view(-1),
            residue=residue.view(entry).view(-1) if residue is not None and kept else None,
            grad=planes[GRAD].view(entry).view(-1),
            matrices=entry.numel // (height * width),
            height=height,
            width=width,
            chunk_rows=min(height, max(1, chunk_elements // width)),
            start=entry.offset,
            grad_scale=grad_scale,
            rounding=rounding,
        )


class FactoredKernels(Protocol):
    """The passes. Factors are [matrices, height] and [matrices, width] fp32; results do not depend on ``threads``."""

    def sums(self, parameter: Factored, *, eps: float, threads: int) -> tuple[Tensor, Tensor]:
        """[matrices, height] and [matrices, width] fp32."""

    def square(self, parameter: Factored, row_factor: Tensor, column_factor: Tensor, *, threads: int) -> Tensor:
        """[1] fp32."""

    def subtract(
        self, parameter: Factored, row_factor: Tensor, column_factor: Tensor, factor: Tensor, *, decay: float, threads: int
    ) -> None:
        """``factor`` [1] fp32 at the parameter's place; the master in place."""
