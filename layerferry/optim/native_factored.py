"""Adafactor in C++ behind ``FactoredKernels``: ``native/adafactor.cpp`` through ctypes, one call a unit; nothing here computes.

One call, because a thread that updates while another runs Python waits for the interpreter each time it comes back to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.optim.addresses import address
from layerferry.optim.factored import Factored, FactoredScalars
from layerferry.optim.kernels import MASTERS, kept_bits


class NativeFactored:
    """``FactoredKernels`` from the shared library; CPU tensors only."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError where the library has no such function."""
        self._step = library.layerferry_factored_step
        self._step.argtypes = [ctypes.POINTER(_Factored), ctypes.c_int64, ctypes.POINTER(_Scalars), ctypes.c_int]
        self._step.restype = None

    def step(self, parameters: Sequence[Factored], scalars: FactoredScalars, *, threads: int) -> None:
        structs = (_Factored * len(parameters))(*(_struct(parameter) for parameter in parameters))
        shared = _Scalars(
            **{name: getattr(scalars, name) for name in ("lr", "beta2", "eps", "clip_threshold", "grad_scale")},
            one_minus_beta2=1.0 - scalars.beta2,
            key_low=scalars.rounding.key_low,
            key_high=scalars.rounding.key_high,
        )
        self._step(structs, len(parameters), ctypes.byref(shared), threads)


class _Factored(ctypes.Structure):
    """``struct Factored`` of ``native/adafactor.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "residue", "grad", "rows", "columns")),
        *((name, ctypes.c_int64) for name in ("matrices", "height", "width", "start")),
        *((name, ctypes.c_int32) for name in ("master", "grad_is_fp32")),
        ("decay", ctypes.c_float),
    )


class _Scalars(ctypes.Structure):
    """``struct Scalars`` there."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("lr", "beta2", "one_minus_beta2", "eps", "clip_threshold", "grad_scale")),
        *((name, ctypes.c_uint32) for name in ("key_low", "key_high")),
    )


def _struct(parameter: Factored) -> _Factored:
    """After checking what C++ cannot."""
    weight, residue, grad, columns = parameter.weight, parameter.residue, parameter.grad, parameter.columns
    rows_in_all, is_matrix = parameter.matrices * parameter.height, columns.numel() > 0
    count = rows_in_all * parameter.width
    assert parameter.start % BLOCK_ELEMENTS == 0
    assert is_matrix or rows_in_all == 1
    return _Factored(
        weight=address(weight, weight.dtype, count),
        residue=None if residue is None else address(residue, residue.dtype, count),
        grad=address(grad, torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32, count),
        rows=address(parameter.rows, torch.float32, rows_in_all if is_matrix else count),
        columns=address(columns, torch.float32, parameter.matrices * parameter.width) if is_matrix else None,
        matrices=parameter.matrices,
        height=parameter.height,
        width=parameter.width,
        start=parameter.start,
        master=MASTERS.index(kept_bits(parameter)),
        grad_is_fp32=grad.dtype == torch.float32,
        decay=parameter.decay,
    )
