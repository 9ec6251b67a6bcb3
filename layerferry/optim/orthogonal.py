"""Newton-Schulz: a matrix becomes nearly orthogonal, in bf16, in buffers whose bytes are known before.

The quintic iteration of Muon (K. Jordan et al., 2024; the coefficients and their five steps are ``torch.optim.Muon``'s) on
X = U S V^T pushes every singular value towards 1, with products of matrices alone::

    X = X / |X|                                        # Frobenius norm: no singular value is above 1
    five times:  G = X X^T,  P = b G + c G^2,  X = a X + P X        # of a tall matrix from the other side, so that G is small

One parameter is one matrix, or a stack of them (experts): as many of a stack are worked on together as fit ``MOST_ELEMENTS``,
the same ones wherever they live. Every product has a buffer for its result, so a stack needs exactly ``workspace_bytes`` beside
its own values; what is allocated besides are norms, one number a matrix.
Checked by ``tests/optim/test_muon.py`` against torch's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from layerferry.layout import MATRICES, Entry, Layout, PlaneSpec, round_up

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
EPS = 1e-7
MOST_ELEMENTS = 1 << 25
"""Of the matrices of a stack that are worked on together: enough to fill a device, 64 MiB."""
_ALIGN_BYTES = 256
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Some matrices of one parameter, or its only one: ``count`` of ``height`` by ``width``, from its element ``start`` on."""

    entry: Entry
    start: int
    count: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        return self.count * self.height * self.width

    @property
    def flops(self) -> float:
        """Of all products."""
        small, large = sorted((self.height, self.width))
        return self.count * NUM_STEPS * (4.0 * small * small * large + 2.0 * small**3)

    def workspace_bytes(self, dtype: torch.dtype) -> int:
        """Beside values of ``dtype``: one buffer as large as bf16 values (two where they are fp32), two of Gram matrices."""
        return sum(size * _BF16_BYTES for size in self._sizes(dtype))

    def workspace(self, buffer: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """``buffer`` as bf16 matrices: those beside the values, then the two Gram matrices."""
        sizes, side = self._sizes(dtype), min(self.height, self.width)
        shapes = [*[self._shape] * (len(sizes) - 2), *[(*self._shape[:-2], side, side)] * 2]
        found: list[Tensor] = []
        begin = 0
        for size, shape in zip(sizes, shapes, strict=True):
            found.append(buffer[begin : begin + prod(shape) * _BF16_BYTES].view(torch.bfloat16).view(shape))
            begin += size * _BF16_BYTES
        return found

    def matrices(self, values: Tensor) -> Tensor:
        """Flat ``values`` [numel] as a matrix, or as a stack of them."""
        return values.view(self._shape)

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.height, self.width) if self.count == 1 else (self.count, self.height, self.width)

    def _sizes(self, dtype: torch.dtype) -> list[int]:
        """Elements of each bf16 buffer, aligned."""
        gram = self.count * min(self.height, self.width) ** 2
        beside = [self.numel] * (1 if dtype == torch.bfloat16 else 2)
        multiple = _ALIGN_BYTES // _BF16_BYTES
        return [round_up(size, multiple) for size in (*beside, gram, gram)]


@lru_cache(maxsize=4096)
def stacks_of(layout: Layout) -> tuple[Stack, ...]:
    """Everything of one unit that is orthogonalised, in layout order."""
    found = []
    for entry in layout.entries:
        if entry.trained and entry.matrix:
            height, width = entry.shape[-2:]
            total, most = entry.numel // (height * width), max(MOST_ELEMENTS // (height * width), 1)
            for first in range(0, total, most):
                size = {"count": min(most, total - first), "height": height, "width": width}
                found.append(Stack(entry=entry, start=first * height * width, **size))
    return tuple(found)


def orthogonalises(specs: Mapping[str, PlaneSpec]) -> bool:
    """Whether the optimizer that keeps planes of ``specs`` works on matrices @device: a plane for matrices alone says so."""
    return any(spec.only == MATRICES for spec in specs.values())


def orthogonalise(stack: Stack, values: Tensor, workspace: Tensor) -> None:
    """``values`` [stack.numel] bf16 or fp32, in place, rounded to bf16 first; ``workspace`` uint8 [>= stack.workspace_bytes]."""
    given = stack.matrices(values)
    *beside, gram, polynomial = stack.workspace(workspace, values.dtype)
    target, source = given, beside[0]
    if given.dtype != torch.bfloat16:
        target = beside[1]
        target.copy_(given)
    norm = target.norm() if stack.count == 1 else torch.linalg.vector_norm(target, dim=(-2, -1), keepdim=True)
    torch.div(target, norm.clamp_(min=EPS), out=source)
    for _ in range(NUM_STEPS):  # an odd number: the last result is in ``target``
        _iterate(source, target, gram, polynomial)
        source, target = target, source
    if given.dtype != torch.bfloat16:
        given.copy_(source)


def _iterate(source: Tensor, target: Tensor, gram: Tensor, polynomial: Tensor) -> None:
    """One step from ``source`` to ``target``."""
    a, b, c = COEFFICIENTS
    product: Callable[..., Tensor] = torch.mm if source.dim() == 2 else torch.bmm
    added: Callable[..., Tensor] = torch.addmm if source.dim() == 2 else torch.baddbmm
    if source.shape[-2] > source.shape[-1]:
        product(source.mT, source, out=gram)
        added(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        added(source, source, polynomial.mT, beta=a, out=target)
    else:
        product(source, source.mT, out=gram)
        added(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        added(source, polynomial, source, beta=a, out=target)
