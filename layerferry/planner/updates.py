"""Seconds and bytes of updates: on the CPU by what a format moves, and on the device what an optimizer in stages does there.

Two formats are measured, AdamW with fp32 moments and with 8-bit ones; another one moves more or fewer bytes than the one that it
is like. Matrices that are orthogonalised have two passes on the CPU, a way up and down the link, and between these their products
on the device, at its rate. Checked by ``tests/planner/test_updates.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from layerferry.engine.sizes import orthogonal_bytes
from layerferry.layout import BLOCK_ELEMENTS, GRAD, GRAD_PLANE, MATRICES, OTHERS, SECTION_DTYPES, Layout, PlaneSpec
from layerferry.optim.orthogonal import orthogonalises, stacks_of
from layerferry.planner.facts import Model
from layerferry.planner.machine import Machine
from layerferry.planner.rate import Rate

OPTIMIZER_BYTES, CODED_OPTIMIZER_BYTES = 26.0, 12 + 4 / BLOCK_ELEMENTS
"""Moved for every parameter by the two updates that ``probe`` measures: fp32 master and moments; 24-bit master, 8-bit moments."""
FINISH_SHARE = 10 / 22
"""Of both passes over matrices with an fp32 master and momentum, that of the second: 10 of 22 bytes."""
ORTHOGONAL_SHARE = 0.85
"""Of the rate of large products: those of 3,584 rows and fewer are less than a device can do."""
LANE_WORKSPACE_BYTES = 32 << 20
"""Of cuBLAS, for each stream that multiplies matrices, on Hopper; less on older devices."""


@lru_cache(maxsize=256)
def room_for_updates(
    model: Model, specs: tuple[tuple[str, PlaneSpec], ...], home: tuple[int, ...]
) -> tuple[tuple[str, int], ...]:
    """(what, bytes @device): exactly what ``engine/stages.py`` allocates, and room for what a library keeps for a lane."""
    num_bytes = sum(orthogonal_bytes(model.units, dict(specs), home))
    if not num_bytes:
        return ()
    return (("matrices that are orthogonalised", num_bytes), ("room for a library's workspace", LANE_WORKSPACE_BYTES))


def moved_bytes_per_param(specs: Mapping[str, PlaneSpec], only: str = OTHERS) -> float:
    """Bytes that an update reads and writes of a parameter that is a matrix, or is not: every plane both ways, the gradient once;
    of a matrix that is orthogonalised the gradient's plane is read, written and read again, and Adafactor, which keeps numbers a
    row and a column, reads it three times."""
    # a number a row is next to nothing
    own = {kind: spec for kind, spec in specs.items() if spec.side is None and spec.only in (None, only)}
    held = {kind: spec.section_bytes(BLOCK_ELEMENTS, spec.dtypes[0]) / BLOCK_ELEMENTS for kind, spec in own.items()}
    staged = orthogonalises(specs) and only == MATRICES
    factored = any(spec.side is not None for spec in specs.values())
    return 2 * sum(held.values()) + (held[GRAD] if staged or factored else -held[GRAD])


def with_update_rate(machine: Machine, specs: Mapping[str, PlaneSpec]) -> Machine:
    """``machine`` with the rates of updates in the format of ``specs``: of matrices, and of the others where they differ."""

    def rate(only: str) -> Rate:
        like, moved = (machine.optimizer_s_per_param, OPTIMIZER_BYTES)
        if any(spec.coded and spec.only in (None, only) for spec in specs.values()):
            like, moved = (machine.coded_optimizer_s_per_param, CODED_OPTIMIZER_BYTES)
        return Rate(like.value * moved_bytes_per_param({**specs, GRAD: GRAD_PLANE}, only) / moved, like.source)

    others = rate(OTHERS) if orthogonalises(specs) else None
    return replace(machine, optimizer_s_per_param=rate(MATRICES), others_s_per_param=others)


def update_s(layout: Layout, machine: Machine) -> float:
    """One unit's update on the CPU, every pass of it."""
    if machine.others_s_per_param is None:
        return layout.num_trained * machine.optimizer_s_per_param.value
    others = layout.num_trained - layout.num_in_matrices
    return layout.num_in_matrices * machine.optimizer_s_per_param.value + others * machine.others_s_per_param.value


def finish_s(layout: Layout, machine: Machine) -> float:
    """Of ``update_s``, what comes after the device."""
    if machine.others_s_per_param is None:
        return 0.0
    return FINISH_SHARE * layout.num_in_matrices * machine.optimizer_s_per_param.value


def orthogonal_s(layout: Layout, machine: Machine) -> float:
    """One unit's products @device."""
    if machine.others_s_per_param is None:
        return 0.0
    return sum(stack.flops for stack in stacks_of(layout)) / (machine.matmul_flops_per_s.value * ORTHOGONAL_SHARE)


def trip_bytes(layout: Layout, specs: Mapping[str, PlaneSpec]) -> int:
    """That travel up, and down again, to be orthogonalised."""
    if not orthogonalises(specs):
        return 0
    sizes = {section: dtype.itemsize for section, dtype in zip(SECTION_DTYPES, specs[GRAD].dtypes, strict=True) if dtype}
    return sum(stack.numel * sizes[stack.entry.dtype] for stack in stacks_of(layout))
