"""Asking autograd for gradients, and adding them up.

``torch.autograd.grad`` refuses inputs that do not require grad; frozen parameters (layers that are not trained, router
corrections that a family declares without gradient) are left out, and have no place in an accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from layerferry.layout import Plane

ADDED_AT_ONCE = 1 << 20
"""Elements."""


def gradients_of(
    outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """dL/d(inputs) for dL/d(outputs) = ``gradients`` (None: an output that is the loss); None where there is no path. An edge
    stands for an output whose values are gone."""
    if not outputs:
        return [None] * len(inputs)
    asked = [tensor for tensor in inputs if tensor.requires_grad]
    edges: list[Any] = list(outputs)  # tensors and edges may be mixed, which its annotation does not say
    found = iter(torch.autograd.grad(edges, asked, list(gradients), allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def add_gradients(accumulator: Plane, gradients: Sequence[Tensor | None]) -> None:
    """Add gradients, in layout order, to the fp32 accumulator; a missing one leaves its span as it is."""
    for entry, gradient in zip(accumulator.layout.entries, gradients, strict=True):
        if gradient is not None:
            _add(accumulator.view(entry), gradient)


def _add(total: Tensor, gradient: Tensor) -> None:
    """On a CPU in slices: torch makes an fp32 copy of what it adds to fp32 there."""
    if gradient.device.type != "cpu" or gradient.dtype == total.dtype or not gradient.ndim:
        total.add_(gradient)
        return
    rows = max(ADDED_AT_ONCE * len(gradient) // gradient.numel(), 1)
    for own, further in zip(torch.split(total, rows), torch.split(gradient, rows), strict=True):
        own.add_(further)
