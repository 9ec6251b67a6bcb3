"""The passes of Adafactor in C++ behind ``FactoredKernels``: ``native/adafactor.cpp`` through ctypes; nothing here computes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.optim.addresses import address
from layerferry.optim.factored import Factored
from layerferry.optim.kernels import MASTERS, kept_bits


class NativeFactored:
    """``FactoredKernels`` from the shared library; CPU tensors only."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError where the library has no such functions."""
        parameter, pointer, number = ctypes.POINTER(_Factored), ctypes.c_void_p, ctypes.c_float
        self._sums = library.layerferry_factored_sums
        self._sums.argtypes, self._sums.restype = [parameter, number, pointer, pointer, ctypes.c_int], None
        self._square = library.layerferry_factored_square
        self._square.argtypes, self._square.restype = [parameter, pointer, pointer, pointer, ctypes.c_int], number
        self._subtract = library.layerferry_factored_subtract
        self._subtract.argtypes = [parameter, pointer, pointer, number, number, ctypes.c_int]
        self._subtract.restype = None

    def sums(self, parameter: Factored, *, eps: float, threads: int) -> tuple[Tensor, Tensor]:
        by_row = torch.empty(parameter.matrices, parameter.height, dtype=torch.float32)
        by_column = torch.zeros(parameter.matrices, parameter.width, dtype=torch.float32)
        self._sums(ctypes.byref(_struct(parameter)), eps, by_row.data_ptr(), by_column.data_ptr(), threads)
        return by_row, by_column

    def square(self, parameter: Factored, row_factor: Tensor, column_factor: Tensor, *, threads: int) -> Tensor:
        struct, by_row = _struct(parameter), torch.empty(parameter.matrices, parameter.height, dtype=torch.float32)
        total = self._square(ctypes.byref(struct), *_factors(parameter, row_factor, column_factor), by_row.data_ptr(), threads)
        return torch.full((1,), total, dtype=torch.float32)

    def subtract(
        self, parameter: Factored, row_factor: Tensor, column_factor: Tensor, factor: Tensor, *, decay: float, threads: int
    ) -> None:
        struct = _struct(parameter)
        self._subtract(ctypes.byref(struct), *_factors(parameter, row_factor, column_factor), float(factor), decay, threads)


class _Factored(ctypes.Structure):
    """``struct Factored`` of ``native/adafactor.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "residue", "grad")),
        *((name, ctypes.c_int64) for name in ("matrices", "height", "width", "chunk_rows", "start")),
        *((name, ctypes.c_uint32) for name in ("key_low", "key_high")),
        *((name, ctypes.c_int32) for name in ("master", "grad_is_fp32")),
        ("grad_scale", ctypes.c_float),
    )


def _struct(parameter: Factored) -> _Factored:
    """After checking what C++ cannot."""
    weight, residue, grad = parameter.weight, parameter.residue, parameter.grad
    count = parameter.matrices * parameter.height * parameter.width
    assert parameter.start % BLOCK_ELEMENTS == 0 and parameter.chunk_rows >= 1
    return _Factored(
        weight=address(weight, weight.dtype, count),
        residue=None if residue is None else address(residue, residue.dtype, count),
        grad=address(grad, torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32, count),
        matrices=parameter.matrices,
        height=parameter.height,
        width=parameter.width,
        chunk_rows=parameter.chunk_rows,
        start=parameter.start,
        key_low=parameter.rounding.key_low,
        key_high=parameter.rounding.key_high,
        master=MASTERS.index(kept_bits(parameter)),
        grad_is_fp32=grad.dtype == torch.float32,
        grad_scale=parameter.grad_scale,
    )


def _factors(parameter: Factored, row_factor: Tensor, column_factor: Tensor) -> tuple[int, int]:
    rows, columns = parameter.matrices * parameter.height, parameter.matrices * parameter.width
    return address(row_factor, torch.float32, rows), address(column_factor, torch.float32, columns)
