"""The C++ kernels behind ``Kernels``: pointers and counts through ctypes, which releases the interpreter lock for the call.

Built and checked by ``build.py``; nothing here compiles, and nothing here computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.optim.addresses import address
from layerferry.optim.kernels import MASTERS, NUMBERS, Moment, Operands, kept_bits, tuned_update
from layerferry.optim.native_factored import NativeFactored
from layerferry.optim.rounding import Rounding
from layerferry.optim.rules import RULES, AdamWScalars, Rule


class NativeKernels:
    """``Kernels`` from a shared library built of ``native/``; CPU tensors only."""

    def __init__(self, library: Path) -> None:
        """Raises OSError or AttributeError where the file is no such library."""
        self._library = ctypes.CDLL(str(library))
        self._adamw_split_bf16 = _function(self._library, "layerferry_adamw_split_bf16", pointers=5, scalars=True)
        self._adamw_split_fp32 = _function(self._library, "layerferry_adamw_split_fp32", pointers=5, scalars=True)
        self._adamw_fp32 = _function(self._library, "layerferry_adamw_fp32", pointers=4, scalars=True)
        self._split = _function(self._library, "layerferry_split", pointers=3, scalars=False)
        self._join = _function(self._library, "layerferry_join", pointers=3, scalars=False)
        self._update = _update_function(self._library)
        self.factored = NativeFactored(self._library)
        self._ceiling = _function(self._library, "layerferry_ceiling", pointers=5, scalars=False)

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
        assert grad.dtype in (torch.bfloat16, torch.float32)
        function = self._adamw_split_bf16 if grad.dtype == torch.bfloat16 else self._adamw_split_fp32
        dtypes = (torch.bfloat16, torch.int16, grad.dtype, torch.float32, torch.float32)
        arguments = _arguments((weight, residue, grad, exp_avg, exp_avg_sq), dtypes)
        function(*arguments, _struct(scalars), threads)

    def adamw_fp32(
        self, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, scalars: AdamWScalars, threads: int
    ) -> None:
        arguments = _arguments((weight, grad, exp_avg, exp_avg_sq), (torch.float32,) * 4)
        self._adamw_fp32(*arguments, _struct(scalars), threads)

    def split(self, master: Tensor, weight: Tensor, residue: Tensor, *, threads: int) -> None:
        self._split(*_arguments((master, weight, residue), (torch.float32, torch.bfloat16, torch.int16)), threads)

    def join(self, weight: Tensor, residue: Tensor, master: Tensor, *, threads: int) -> None:
        self._join(*_arguments((weight, residue, master), (torch.bfloat16, torch.int16, torch.float32)), threads)

    def update(self, rule: Rule, operands: Operands, *, rounding: Rounding, threads: int) -> None:
        if not tuned_update(self, rule, operands, threads=threads):
            self.general_update(rule, operands, rounding=rounding, threads=threads)

    def general_update(self, rule: Rule, operands: Operands, *, rounding: Rounding, threads: int) -> None:
        """``update`` through ``native/formats.cpp`` whatever the format."""
        self._update(ctypes.byref(_update(rule, operands, rounding)), threads)

    def ceiling(
        self, weight: Tensor, residue: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, threads: int
    ) -> None:
        """The memory traffic of ``adamw_split`` with next to no arithmetic, for the benchmark. Overwrites all but ``grad``."""
        dtypes = (torch.bfloat16, torch.int16, torch.bfloat16, torch.float32, torch.float32)
        self._ceiling(*_arguments((weight, residue, grad, exp_avg, exp_avg_sq), dtypes), threads)


class _Update(ctypes.Structure):
    """``struct Update`` of ``native/formats.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "residue", "grad", "first")),
        *((name, ctypes.c_void_p) for name in ("first_exponents", "second", "second_exponents")),
        *((name, ctypes.c_int64) for name in ("count", "start")),
        *((name, ctypes.c_uint32) for name in ("key_low", "key_high")),
        *((name, ctypes.c_int32) for name in ("rule", "master", "grad_is_fp32")),
        ("numbers", ctypes.c_float * NUMBERS),
    )


def _update(rule: Rule, operands: Operands, rounding: Rounding) -> _Update:
    """The struct, after checking what C++ cannot."""
    weight, residue, grad, count = operands.weight, operands.residue, operands.grad, operands.weight.numel()
    assert count % BLOCK_ELEMENTS == 0 and operands.start % BLOCK_ELEMENTS == 0, "whole blocks"
    return _Update(
        weight=address(weight, weight.dtype, count),
        residue=None if residue is None else address(residue, residue.dtype, count),
        grad=address(grad, torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32, count),
        **_moment("first", operands.first, count),
        **_moment("second", operands.second, count),
        count=count,
        start=operands.start,
        key_low=rounding.key_low,
        key_high=rounding.key_high,
        rule=RULES.index(type(rule)),
        master=MASTERS.index(kept_bits(operands)),
        grad_is_fp32=grad.dtype == torch.float32,
        numbers=(ctypes.c_float * NUMBERS)(*astuple(rule)),
    )


def _moment(name: str, moment: Moment | None, count: int) -> dict[str, int | None]:
    if moment is None:
        return {name: None, f"{name}_exponents": None}
    if moment.exponents is None:
        return {name: address(moment.values, torch.float32, count), f"{name}_exponents": None}
    return {
        name: address(moment.values, torch.uint8, count),
        f"{name}_exponents": address(moment.exponents, torch.uint8, count // BLOCK_ELEMENTS),
    }


class _Scalars(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in AdamWScalars.__dataclass_fields__)


def _struct(scalars: AdamWScalars) -> _Scalars:
    return _Scalars(*astuple(scalars))


def _update_function(library: ctypes.CDLL) -> Callable[..., None]:
    function: ctypes._NamedFuncPointer = library.layerferry_update
    function.argtypes = [ctypes.POINTER(_Update), ctypes.c_int]
    function.restype = None
    return function


def _function(library: ctypes.CDLL, name: str, *, pointers: int, scalars: bool) -> Callable[..., None]:
    function: ctypes._NamedFuncPointer = getattr(library, name)
    by_reference = [ctypes.POINTER(_Scalars)] if scalars else []
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] + by_reference + [ctypes.c_int]
    function.restype = None
    return function


def _arguments(tensors: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[int, ...]:
    """Addresses and the count, after checking what C++ cannot."""
    count = tensors[0].numel()
    return (*(address(tensor, dtype, count) for tensor, dtype in zip(tensors, dtypes, strict=True)), count)
