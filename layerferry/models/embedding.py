"""Embedding look-ups without a dense gradient.

A table of V x D rows would get a dense V x D gradient per micro-batch. The tap answers ``F.embedding`` calls inside the
prologue with a leaf, remembers the ids, and after the prologue's backward the leaf's gradient is added row by row into the
accumulator. In the epilogue's dummy forward no table need be on the device: the blind tap answers with zeros.

Where a table is not whole on the device, the rows that are needed were gathered before, and the served tap answers with them.

It intercepts the function, not the modules, so families that scale, cap or wrap their embedding need nothing of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class LookUp:
    """One tapped call: rows ``ids`` of ``table`` became ``leaf``; row ``padding_idx`` gets no gradient."""

    table: Tensor  # [V, D] @device, a bound parameter
    ids: Tensor  # [...] int64 @device
    leaf: Tensor  # [..., D] @device, one number in memory: stands for the values in the graph
    padding_idx: int | None

    def add_gradient(self, gradient: Tensor, target: Tensor, first: int = 0) -> None:
        """``target`` [R, D] (accumulator) += ``gradient`` [..., D] at the looked-up rows; it has those from ``first`` on.

        Each row's sum has the same order whatever the parts. Look-ups of other rows add -0.0, which changes no number, spread
        over the rows there are: to leave them out would need their count, for which the host would wait.
        """
        rows = gradient.reshape(-1, gradient.shape[-1])
        ids = self.ids.reshape(-1)
        if self.padding_idx is not None:
            rows = rows.masked_fill((ids == self.padding_idx)[:, None], 0)
        if len(target) < len(self.table):
            ids = ids - first
            rows = torch.where(((ids >= 0) & (ids < len(target)))[:, None], rows, -0.0)
            ids = ids.remainder(len(target))
        target.index_add_(0, ids, rows.to(target.dtype))


class _Tap(TorchFunctionMode):
    """Answers ``F.embedding`` by its own ``embedding``; every other call runs as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self.embedding if func is F.embedding else func)(*args, **(kwargs or {}))

    def embedding(self, input: Tensor, weight: Tensor, *options: Any, **more: Any) -> Tensor:
        """As ``F.embedding`` is called."""
        raise NotImplementedError


class EmbeddingTap(_Tap):
    """Taps look-ups in ``tables`` (bound parameters)."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__()
        self._tables = {id(table) for table in tables}
        self.look_ups: list[LookUp] = []

    @staticmethod
    def blind(blank: float = 0.0) -> TorchFunctionMode:
        """Every look-up gives ``blank``, in the right shape; no table is read."""
        return _BlindTap(blank)

    def embedding(self, input: Tensor, weight: Tensor, *options: Any, **more: Any) -> Tensor:
        padding_idx, max_norm, scale_grad = _options(*options, **more)
        if id(weight) not in self._tables or max_norm is not None or scale_grad:
            return F.embedding(input, weight, *options, **more)
        values = self._values(input, weight)
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return values
        # -0.0 is what changes no value when it is added, not even another -0.0. The leaf is one number, seen as [..., D];
        # its sum with the values is not a leaf, so families that scale their embeddings in place may (ctrl).
        leaf = torch.full((), -0.0, dtype=values.dtype, device=values.device).expand(values.shape).requires_grad_(True)
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        self.look_ups.append(LookUp(weight, input, leaf, padding_idx))
        return values + leaf

    def _values(self, ids: Tensor, table: Tensor) -> Tensor:
        """[..., D]: may be changed in place."""
        return F.embedding(ids, table.detach())


class ServedTap(EmbeddingTap):
    """Also answers look-ups in tables that are not there: with rows that have been gathered for ``ids``."""

    def __init__(self, tables: Sequence[Tensor], ids: Tensor, served: Sequence[tuple[Tensor, Tensor]]) -> None:
        """``served``: what stands in for a table [V, D], and its rows [ids.numel(), D] at ``ids``."""
        super().__init__([*tables, *(table for table, _ in served)])
        self._ids = ids
        self._served = {id(table): rows for table, rows in served}

    def _values(self, ids: Tensor, table: Tensor) -> Tensor:
        rows = self._served.get(id(table))
        if rows is None:
            return super()._values(ids, table)
        assert same_memory(ids, self._ids), "a table is looked up with other ids than the trial saw"
        return rows.view(*ids.shape, rows.shape[-1]).clone()


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same elements in the same order: asked without reading them."""
    return (
        one.data_ptr() == other.data_ptr()
        and (one.dtype, one.numel()) == (other.dtype, other.numel())
        and one.is_contiguous()
        and other.is_contiguous()
    )


class _BlindTap(_Tap):
    """Answers every look-up with one number in the right shape; the tables are not read."""

    def __init__(self, blank: float) -> None:
        super().__init__()
        self._blank = blank

    def embedding(self, input: Tensor, weight: Tensor, *options: Any, **more: Any) -> Tensor:
        return torch.full((*input.shape, weight.shape[1]), self._blank, dtype=weight.dtype, device=input.device)


def _options(
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[int | None, float | None, bool]:
    """What of the further arguments of ``F.embedding`` matters here."""
    return padding_idx, max_norm, scale_grad_by_freq
