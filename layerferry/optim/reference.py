"""Updates in plain torch: the meaning of the native kernels, their stand-in without a compiler, and the step of device planes.

The operations and their order are those of ``rules.py``, one fp32 rounding each. ``addcmul``, ``lerp`` and
``alpha=`` do not occur: they are fused multiply-adds on some CPUs and would change bits.
Runs in blocks, so that temporaries stay small beside a unit's planes. ``threads`` is torch's own affair and ignored here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.master import join_master, split_master
from layerferry.optim.blocks import decode, encode
from layerferry.optim.factored import FactoredKernels
from layerferry.optim.kernels import Moment, Operands
from layerferry.optim.masters import load_master, store_master
from layerferry.optim.reference_factored import ReferenceFactored
from layerferry.optim.rounding import Rounding, for_exp_avg, for_exp_avg_sq, random_words
from layerferry.optim.rules import AdamWScalars, MomentumScalars, Rule, update

CPU_BLOCK = 1 << 20
"""Elements at a time: a few MiB of temporaries, and enough work for torch's threads."""
DEVICE_BLOCK = 1 << 24
"""On a device: enough work per launch."""


class ReferenceKernels:
    """``Kernels`` in torch, on any device."""

    def __init__(self) -> None:
        self.factored: FactoredKernels = ReferenceFactored()

    def adamw_split(
        self,
        weight: Tensor,
        residue: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        scalars: AdamWScalars,
        threads: int,
    ) -> None:
        for w, r, g, m, v in _blocks(weight, residue, grad, exp_avg, exp_avg_sq):
            master = join_master(w, r)
            update(scalars, master, g.to(torch.float32), m, v)
            new_weight, new_residue = split_master(master)
            w.copy_(new_weight)
            r.copy_(new_residue)

    def adamw_fp32(
        self, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, scalars: AdamWScalars, threads: int
    ) -> None:
        for w, g, m, v in _blocks(weight, grad, exp_avg, exp_avg_sq):
            update(scalars, w, g, m, v)

    def split(self, master: Tensor, weight: Tensor, residue: Tensor, *, threads: int) -> None:
        for x, w, r in _blocks(master, weight, residue):
            new_weight, new_residue = split_master(x)
            w.copy_(new_weight)
            r.copy_(new_residue)

    def join(self, weight: Tensor, residue: Tensor, master: Tensor, *, threads: int) -> None:
        for w, r, x in _blocks(weight, residue, master):
            x.copy_(join_master(w, r))

    def update(self, rule: Rule, operands: Operands, *, rounding: Rounding, threads: int) -> None:
        numel = operands.weight.numel()
        assert numel % BLOCK_ELEMENTS == 0
        size = CPU_BLOCK if operands.weight.device.type == "cpu" else DEVICE_BLOCK
        for begin in range(0, numel, size):
            _step(rule, cut(operands, begin, min(begin + size, numel)), rounding)


def _step(rule: Rule, operands: Operands, rounding: Rounding) -> None:
    random = random_words(rounding, operands.start, operands.weight.numel(), operands.weight.device)
    master, grad = load_master(operands.weight, operands.residue), operands.grad.to(torch.float32)
    first, second = (_loaded(operands.first, signed=True), _loaded(operands.second, signed=False))
    update(rule, master, grad, first, second)
    if isinstance(rule, MomentumScalars):
        operands.grad.copy_(grad)
    else:
        store_master(master, operands.weight, operands.residue, random)
    _store_moment(first, operands.first, signed=True, random=for_exp_avg(random))
    _store_moment(second, operands.second, signed=False, random=for_exp_avg_sq(random))


def cut(operands: Operands, begin: int, end: int) -> Operands:
    """The elements from ``begin`` to ``end``, both whole blocks."""

    def part(moment: Moment | None) -> Moment | None:
        if moment is None:
            return None
        blocks = None if moment.exponents is None else moment.exponents[begin // BLOCK_ELEMENTS : end // BLOCK_ELEMENTS]
        return Moment(values=moment.values[begin:end], exponents=blocks)

    return Operands(
        weight=operands.weight[begin:end],
        residue=None if operands.residue is None else operands.residue[begin:end],
        grad=operands.grad[begin:end],
        first=part(operands.first),
        second=part(operands.second),
        start=operands.start + begin,
    )


def _loaded(moment: Moment | None, *, signed: bool) -> Tensor | None:
    """fp32 values; of an fp32 moment the plane itself."""
    if moment is None or moment.exponents is None:
        return None if moment is None else moment.values
    return decode(moment.values, moment.exponents, signed=signed)


def _store_moment(values: Tensor | None, moment: Moment | None, *, signed: bool, random: Tensor) -> None:
    if values is not None and moment is not None and moment.exponents is not None:
        codes, exponents = encode(values, signed=signed, random=random)
        moment.values.copy_(codes)
        moment.exponents.copy_(exponents)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    block = CPU_BLOCK if tensors[0].device.type == "cpu" else DEVICE_BLOCK
    for start in range(0, tensors[0].numel(), block):
        yield tuple(tensor[start : start + block] for tensor in tensors)
