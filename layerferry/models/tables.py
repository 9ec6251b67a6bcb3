"""Which parameters of the ends can be used some rows at a time, so that the ends may be fed in parts: tried, not looked up.

- The head's weight and bias, where ``linear_head.shape_of`` knows what follows it.
- Tables of the prologue whose only use is to be looked up with exactly the model's input ids: then the rows that a micro-batch
  needs can be gathered before the family's own code runs. The trial runs that code with NaN in the tables' places.

Tied ends are fed whole: their sum of gradients is open from the head's backward to the prologue's.
Checked by ``tests/models/test_tables.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from layerferry.backends.pages import untouched_zeros
from layerferry.layout import WEIGHT_PLANE, Plane
from layerferry.models.embedding import EmbeddingTap, ServedTap, same_memory
from layerferry.models.graph import tensors_in
from layerferry.models.inputs import Inputs
from layerferry.models.linear_head import shape_of

if TYPE_CHECKING:
    from layerferry.models.skeleton import Skeleton
    from layerferry.units import Unit


def tables_of(skeleton: Skeleton) -> dict[int, tuple[str, ...]]:
    """Unit index -> names of its tables, on a skeleton whose buffers are on the CPU; nothing of it is bound afterwards."""
    ends = (skeleton.prologue_unit, skeleton.epilogue_unit)
    if ends[0] is ends[1]:
        return {}
    with _on_zeros(skeleton, ends) as parameters:
        head = skeleton.head if shape_of(skeleton) is not None else None
        looked_up = _looked_up(skeleton, parameters[ends[0].index])
    found = {ends[0].index: looked_up}
    if head is not None:
        found[ends[1].index] = tuple(entry.name for entry in head if entry is not None)
    return found


@contextmanager
def standing_in(skeleton: Skeleton, unit: Unit, device: torch.device) -> Iterator[list[nn.Parameter]]:
    """NaN, one number in memory, in the place of each table of ``unit`` for a while; in the order of ``unit.tables``."""
    with ExitStack() as lent:
        yield [_lend(skeleton, unit, name, device, lent) for name in unit.tables]


def _lend(skeleton: Skeleton, unit: Unit, name: str, device: torch.device, lent: ExitStack) -> nn.Parameter:
    entry, full = unit.layout.by_name[name], unit.names[name]
    dtype = torch.float32 if entry.dtype == torch.float32 else torch.bfloat16
    number = torch.full((), torch.nan, dtype=dtype, device=device)
    parameter = nn.Parameter(number.expand(entry.shape), requires_grad=skeleton.is_trained(full))
    lent.enter_context(skeleton.lent(full, parameter))
    return parameter


@contextmanager
def _on_zeros(skeleton: Skeleton, units: tuple[Unit, ...]) -> Iterator[dict[int, list[nn.Parameter]]]:
    """The ends bound to zeros that take no memory; by unit index, in layout order."""

    def planes(device: str) -> dict[int, list[nn.Parameter]]:
        made = {}
        for unit in units:
            buffer = untouched_zeros([unit.layout.bytes(WEIGHT_PLANE)], torch.uint8)
            made[unit.index] = skeleton.bind(unit, Plane(unit.layout, WEIGHT_PLANE, buffer.to(device)))
        return made

    try:
        yield planes("cpu")
    finally:
        planes("meta")


def _looked_up(skeleton: Skeleton, parameters: list[nn.Parameter]) -> tuple[str, ...]:
    unit = skeleton.prologue_unit
    ids = torch.arange(4).remainder(skeleton.vocab_size).view(1, 4)
    tap = EmbeddingTap(parameters)
    frozen = [parameter.requires_grad_() for parameter in parameters if not parameter.requires_grad]
    with torch.enable_grad():
        skeleton.prologue(Inputs(ids), tap)
    for parameter in frozen:  # look-ups of frozen tables are noted for once
        parameter.requires_grad_(False)
    found = []
    for entry, parameter in zip(unit.layout.entries, parameters, strict=True):
        own = [look_up for look_up in tap.look_ups if look_up.table is parameter]
        if own and parameter.dim() == 2 and all(same_memory(look_up.ids, ids) for look_up in own):
            found.append(entry.name)
    return tuple(name for name in found if _is_only_looked_up(skeleton, name, parameters, ids))


def _is_only_looked_up(skeleton: Skeleton, name: str, parameters: list[nn.Parameter], ids: Tensor) -> bool:
    """Whether NaN in the table's place is seen nowhere, once its look-ups are answered."""
    unit = skeleton.prologue_unit
    entry = unit.layout.by_name[name]
    with ExitStack() as lent, torch.no_grad():
        table = _lend(skeleton, unit, name, torch.device("cpu"), lent)
        rows = torch.zeros(ids.numel(), entry.shape[1], dtype=table.dtype)
        hidden, calls = skeleton.prologue(Inputs(ids), ServedTap(parameters, ids, [(table, rows)]))
        seen = [hidden, *(tensor for call in calls for tensor in tensors_in((call.args, call.kwargs)))]
        return not any(bool(torch.isnan(tensor).any()) for tensor in seen if tensor.is_floating_point())
