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

from layerferry.optim.kernels import AdamWScalars


class NativeKernels:
    """``Kernels`` from a shared library built of ``native/adamw.cpp``; CPU tensors only."""

    def __init__(self, library: Path) -> None:
        """Raises OSError or AttributeError where the file is no such library."""
        self._library = ctypes.CDLL(str(library))
        self._adamw_split_bf16 = _function(self._library, "layerferry_adamw_split_bf16", pointers=5, scalars=True)
        self._adamw_split_fp32 = _function(self._library, "layerferry_adamw_split_fp32", pointers=5, scalars=True)
        self._adamw_fp32 = _function(self._library, "layerferry_adamw_fp32", pointers=4, scalars=True)
        self._split = _function(self._library, "layerferry_split", pointers=3, scalars=False)
        self._join = _function(self._library, "layerferry_join", pointers=3, scalars=False)
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

    def ceiling(
        self, weight: Tensor, residue: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, threads: int
    ) -> None:
        """The memory traffic of ``adamw_split`` with next to no arithmetic, for the benchmark. Overwrites all but ``grad``."""
        dtypes = (torch.bfloat16, torch.int16, torch.bfloat16, torch.float32, torch.float32)
        self._ceiling(*_arguments((weight, residue, grad, exp_avg, exp_avg_sq), dtypes), threads)


class _Scalars(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in AdamWScalars.__dataclass_fields__)


def _struct(scalars: AdamWScalars) -> _Scalars:
    return _Scalars(*astuple(scalars))


def _function(library: ctypes.CDLL, name: str, *, pointers: int, scalars: bool) -> Callable[..., None]:
    function: ctypes._NamedFuncPointer = getattr(library, name)
    by_reference = [ctypes.POINTER(_Scalars)] if scalars else []
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] + by_reference + [ctypes.c_int]
    function.restype = None
    return function


def _arguments(tensors: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[int, ...]:
    """Addresses and the count, after checking what C++ cannot."""
    count = tensors[0].numel()
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        assert tensor.dtype == dtype, f"a kernel got {tensor.dtype} for {dtype}"
        assert tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() == count
    return (*(tensor.data_ptr() for tensor in tensors), count)
