"""Stacked experts of which some are there at a time: what they are asked is noted, and answered later.

Families hand their experts ``(hidden [N, D], index [N, K], weights [N, K])`` and get ``[N, D]`` (transformers' experts
interface). ``ExpertsTap`` stands in the place of that one call inside a layer: it notes the question and answers with what it was
told, so the layer's own forward runs, whatever it does before and after, without a single expert. ``SomeExperts`` are the
family's own module over the tables of a range: they are given the chosen pairs of (token, expert) that fall into it, each as a
token with one expert.

Sums over experts are in fp32, in the order of the parts and within one in that of a token's choices, and are rounded once; no two
threads add to one number, so no schedule changes a bit. How many pairs each expert has the host reads for all micro-batches of
a wave at once (``count_pairs``), before the first of their experts runs.

Left out: layers with several such modules, and tables that are no stacks of all experts; they travel whole. A layer that calls
its experts twice in a forward, or with other shapes, is refused. Checked by ``tests/models/test_experts_in_parts.py``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from layerferry.errors import ModelRefused
from layerferry.layout import WEIGHT_PLANE, Plane
from layerferry.units import Part, Unit


def stacked_experts(layer: nn.Module) -> str | None:
    """Path inside ``layer`` of the module with its stacked experts; None where there is not exactly one that can be divided."""
    found = [
        name for name, module in layer.named_modules() if hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")
    ]
    return found[0] if len(found) == 1 and _is_stacked(layer.get_submodule(found[0])) else None


def _is_stacked(module: nn.Module) -> bool:
    """Whether all that it has is tables with a row for each expert."""
    count, tables = getattr(module, "num_experts", 0), dict(module.named_parameters())
    own = all("." not in name and table.dim() > 1 and len(table) == count for name, table in tables.items())
    return bool(tables) and own and not list(module.buffers())


def expert_tables(layer: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that can be used some experts at a time."""
    path = stacked_experts(layer)
    return () if path is None else tuple(f"{path}.{name}" for name, _ in layer.get_submodule(path).named_parameters())


def undividable(layers: Iterable[Unit]) -> str | None:
    """Why ``layers`` can only be fed whole; None where some have experts that can be fed in parts."""
    return None if any(unit.tables for unit in layers) else "its layers have no stacked experts"


class ExpertsRefused(ModelRefused):
    """A layer calls its experts in a way that cannot be answered in parts."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: expert_parts: 1 feeds it whole")
        self.reason = reason


@dataclass(eq=False)
class Asked:
    """What the experts of one layer were asked for one micro-batch. Without graph."""

    hidden: Tensor  # [N, D] @device
    index: Tensor  # [N, K] int64 @device
    weights: Tensor  # [N, K] @device
    num_experts: int
    ends: list[int] = field(default_factory=list)
    """Where each expert's pairs begin in ``order``, and where the last one's end; empty before ``count_pairs``."""

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """Experts of the pairs of (token, choice) in ascending order, and the pairs themselves: [N * K] int64 @device."""
        experts, order = torch.sort(self.index.reshape(-1), stable=True)
        return experts, order

    @property
    def bounds(self) -> Tensor:
        """[num_experts + 1] int64 @device; the host waits for nothing."""
        return torch.searchsorted(self._sorted[0], torch.arange(self.num_experts + 1, device=self.index.device))

    def pairs(self, experts: range) -> Tensor:
        """The chosen pairs that fall into a range of ``experts``: [S] int64 @device, places in [N * K]."""
        return self._sorted[1][self.ends[experts.start] : self.ends[experts.stop]]

    def tokens(self, pairs: Tensor) -> Tensor:
        """[S]: the token of each pair."""
        return pairs // self.index.shape[1]

    def chosen(self, pairs: Tensor, experts: range) -> Sequence[Tensor]:
        """What ``SomeExperts`` of a range are called with for its ``pairs``: hidden [S, D], index [S], weights [S]."""
        return (
            self.hidden.index_select(0, self.tokens(pairs)),
            self.index.reshape(-1).index_select(0, pairs) - experts.start,
            self.weights.reshape(-1).index_select(0, pairs),
        )

    def spread(self, values: Tensor, pairs: Tensor, sums: Tensor) -> None:
        """``sums`` [N, D] fp32 += ``values`` [S, D] of ``pairs``, one choice after the other: one order, on every device."""
        count, choices = self.index.shape
        with_zeros = torch.cat([values, values.new_zeros(1, values.shape[1])])
        place = torch.full((count * choices,), len(pairs), dtype=torch.int64, device=pairs.device)
        place.scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
        for own in place.view(count, choices).unbind(1):
            sums += with_zeros.index_select(0, own)


def count_pairs(asked: Sequence[Asked]) -> None:
    """Fills in ``ends``. The host waits for the device once."""
    for one, ends in zip(asked, torch.stack([one.bounds for one in asked]).tolist(), strict=True):
        one.ends = ends


class _Answer(torch.autograd.Function):
    """``values`` in the forward; in the backward, what the experts' own would have given."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, values: Tensor, slopes: tuple[Tensor, Tensor]) -> Tensor:
        ctx.slopes = slopes
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_hidden, by_weights = ctx.slopes
        return by_hidden, by_weights, None, None


class ExpertsTap:
    """Stands in the place of a layer's experts. Only inside ``asking`` or ``answering`` the layer can run."""

    def __init__(self, layer: nn.Module) -> None:
        path = stacked_experts(layer)
        assert path is not None, "a layer without stacked experts is whole"
        module: Any = layer.get_submodule(path)
        self._name, self._num_experts = type(module).__name__, int(module.num_experts)
        self._signature = inspect.signature(type(module).forward)
        self._module = module
        self._asked: list[Asked] | None = None
        self._values: Tensor | None = None
        self._slopes: tuple[Tensor, Tensor] | None = None
        self._calls = 0
        module.forward = self._forward

    @contextmanager
    def asking(self) -> Iterator[list[Asked]]:
        """Inside, the layer runs once, its experts answer zeros, and the list has what they were asked."""
        self._asked = []
        with self._once():
            yield self._asked

    @contextmanager
    def answering(self, values: Tensor, slopes: tuple[Tensor, Tensor] | None = None) -> Iterator[None]:
        """Inside, the layer's experts give ``values`` [N, D]. ``slopes``: and in the backward dL/d(hidden) [N, D] and
        dL/d(weights) [N, K], whatever comes down to them; without, ``values`` may be a leaf."""
        self._values, self._slopes = values, slopes
        with self._once():
            yield

    @contextmanager
    def _once(self) -> Iterator[None]:
        self._calls = 0
        try:
            yield
        finally:
            self._asked = self._values = self._slopes = None
        if not self._calls:
            raise ExpertsRefused(f"{self._name}: a layer ran without its experts")

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self._calls += 1
        given = self._signature.bind(self._module, *args, **kwargs).args[1:]
        shapes = [tuple(tensor.shape) for tensor in given if isinstance(tensor, Tensor)]
        if not (len(given) == len(shapes) == 3 and len(shapes[0]) == len(shapes[1]) == 2 and shapes[1] == shapes[2]):
            raise ExpertsRefused(f"{self._name}: called with {shapes}, not hidden, index, weights")
        hidden, index, weights = given
        if self._asked is not None:
            if self._asked:
                raise ExpertsRefused(f"{self._name}: runs twice in a layer")
            # copies: what comes after may change them in place
            self._asked.append(Asked(hidden.detach().clone(), index.clone(), weights.detach().clone(), self._num_experts))
            return torch.zeros_like(hidden)
        assert self._values is not None, "a layer without its experts runs"
        if self._slopes is None:
            return self._values.clone()
        answer: Tensor = _Answer.apply(hidden, weights, self._values, self._slopes)  # type: ignore[no-untyped-call]
        return answer


class SomeExperts:
    """The family's experts module with the experts of ``part`` alone, in a slot. ``parameters`` follow the order of the part's
    layout."""

    def __init__(self, layer: nn.Module, part: Part, buffer: Tensor) -> None:
        path = stacked_experts(layer)
        assert path is not None
        self.module = copy.deepcopy(layer.get_submodule(path))
        self.experts = next(iter(part.rows.values()))
        self.module.__dict__["num_experts"] = len(self.experts)
        self.parameters: list[nn.Parameter] = []
        plane = Plane(part.layout, WEIGHT_PLANE, buffer)
        for entry in part.layout.entries:
            parameter = nn.Parameter(plane.view(entry), requires_grad=entry.trained)
            self.module._parameters[entry.name.rpartition(".")[2]] = parameter
            self.parameters.append(parameter)

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden [S, D], index [S] (of this part's experts), weights [S] -> [S, D] of one expert each, weighted."""
        answer: Tensor = self.module(hidden, index.unsqueeze(1), weights.unsqueeze(1))
        return answer
