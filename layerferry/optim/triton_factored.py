"""Adafactor for planes on a CUDA device: the Triton source of ``device_factored.py``.

The passes and sums of ``native/adafactor.cpp``, tile by tile. Halving a tile adds two numbers at a time, so that no order is left
to the compiler; a program walks the tiles of its rows or columns in their order. Gradients are read four times, which takes a
GPU less than handing partial sums on would. Imported when a device plane is first stepped, because it needs Triton to be read.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from layerferry.optim.triton_formats import _load_master, _random, _store_master


@triton.jit
def _halved(values, LEVELS: tl.constexpr):
    """[rows, 2 ** LEVELS] -> [rows]."""
    rows: tl.constexpr = values.shape[0]
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, [rows, 2, 1 << (LEVELS - level - 1)]), axis=1)
    return tl.reshape(values, [rows])


@triton.jit
def _halved_rows(values, LEVELS: tl.constexpr):
    """[2 ** LEVELS, columns] -> [columns]."""
    columns: tl.constexpr = values.shape[1]
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, [2, 1 << (LEVELS - level - 1), columns]), axis=0)
    return tl.reshape(values, [columns])


@triton.jit
def _inverse_root(values):
    root = tl.sqrt_rn(values)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit(do_not_specialize=["num_rows", "height"])
def sums_by_row(
    grad_ptr, row_factors_ptr, column_factors_ptr, out_ptr, num_rows, height, width, grad_scale, eps,
    OF_UPDATE: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Of squared gradients; or of the squared update."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    if OF_UPDATE:
        row_factor = tl.load(row_factors_ptr + row, mask=inside, other=0.0)
        columns_of = column_factors_ptr + row // height * width
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, 1 << LEVELS):
        column = start + tl.arange(0, 1 << LEVELS)
        mask = inside[:, None] & (column < width)[None, :]
        scaled = tl.load(grad_ptr + row[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32) * grad_scale
        if OF_UPDATE:
            column_factor = tl.load(columns_of[:, None] + column[None, :], mask=mask, other=0.0)
            update = row_factor[:, None] * column_factor * scaled
            squared = update * update
        else:
            squared = scaled * scaled + eps
        total = total + _halved(tl.where(mask, squared, 0.0), LEVELS)
    tl.store(out_ptr + row, total, mask=inside)


@triton.jit(do_not_specialize=["height"])
def sums_by_column(grad_ptr, out_ptr, height, width, grad_scale, eps, COLUMNS: tl.constexpr, LEVELS: tl.constexpr):
    """Of squared gradients, a matrix on each place of the first axis, of which there may be more than of the second."""
    matrix = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, height, 1 << LEVELS):
        row = start + tl.arange(0, 1 << LEVELS)
        mask = (row < height)[:, None] & inside[None, :]
        at = (matrix * height + row)[:, None] * width + column[None, :]
        scaled = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32) * grad_scale
        total = total + _halved_rows(tl.where(mask, scaled * scaled + eps, 0.0), LEVELS)
    tl.store(out_ptr + matrix * width + column, total, mask=inside)


@triton.jit
def _decayed(moment, sums, divisor, beta2, one_minus_beta2):
    return moment * beta2 + tl.div_rn(sums, divisor + tl.zeros(sums.shape, tl.float32)) * one_minus_beta2


@triton.jit(do_not_specialize=["numel"])
def take_columns(
    moments_ptr, sums_ptr, factors_ptr, numel, divisor, beta2, one_minus_beta2, BLOCK: tl.constexpr
):  # fmt: skip
    """Sums into moments, moments into factors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    sums = tl.load(sums_ptr + at, mask=inside, other=1.0)
    moment = _decayed(tl.load(moments_ptr + at, mask=inside, other=1.0), sums, divisor, beta2, one_minus_beta2)
    tl.store(moments_ptr + at, moment, mask=inside)
    tl.store(factors_ptr + at, _inverse_root(moment), mask=inside)


@triton.jit(do_not_specialize=["height"])
def take_rows(
    moments_ptr, sums_ptr, factors_ptr, height, width_number, height_number, beta2, one_minus_beta2, LEVELS: tl.constexpr
):  # fmt: skip
    """The same of the rows of one matrix, whose mean must be known between."""
    first = tl.program_id(0).to(tl.int64) * height
    total = tl.zeros([1], tl.float32)
    for start in range(0, height, 1 << LEVELS):
        row = start + tl.arange(0, 1 << LEVELS)
        inside = row < height
        sums = tl.load(sums_ptr + first + row, mask=inside, other=0.0)
        moment = tl.load(moments_ptr + first + row, mask=inside, other=0.0)
        moment = _decayed(moment, sums, width_number, beta2, one_minus_beta2)
        tl.store(moments_ptr + first + row, moment, mask=inside)
        total = total + _halved(tl.where(inside, moment, 0.0)[None, :], LEVELS)
    mean = tl.div_rn(total, height_number + tl.zeros([1], tl.float32))
    tl.debug_barrier()
    for start in range(0, height, 1 << LEVELS):
        row = start + tl.arange(0, 1 << LEVELS)
        inside = row < height
        moment = tl.load(moments_ptr + first + row, mask=inside, other=1.0)
        tl.store(
            factors_ptr + first + row, _inverse_root(tl.div_rn(moment, mean + tl.zeros(moment.shape, tl.float32))), mask=inside
        )


@triton.jit(do_not_specialize=["count"])
def clipped(squares_ptr, factor_ptr, count, elements, threshold, lr, LEVELS: tl.constexpr):
    """What the whole update is multiplied with. One program."""
    total = tl.zeros([1], tl.float32)
    for start in range(0, count, 1 << LEVELS):
        at = start + tl.arange(0, 1 << LEVELS)
        total = total + _halved(tl.load(squares_ptr + at, mask=at < count, other=0.0)[None, :], LEVELS)
    none = tl.zeros([1], tl.float32)
    size = tl.div_rn(tl.sqrt_rn(tl.div_rn(total, elements + none)), threshold + none)
    factor = tl.div_rn(none + 1.0, tl.where(size < 1.0, 1.0, size)) * lr
    tl.store(factor_ptr + tl.arange(0, 1), factor)


@triton.jit(do_not_specialize=["numel", "start_block", "height", "key_low", "key_high"])
def subtract(
    weight_ptr, residue_ptr, grad_ptr, row_factors_ptr, column_factors_ptr, factor_ptr,
    numel, start_block, height, width, key_low, key_high, grad_scale, decay,
    MASTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The update and the decay from the master, in whole blocks of random numbers."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    at = block[:, None] * BLOCK + lane[None, :]
    mask = at < numel
    row = at // width
    column = at - row * width
    row_factor = tl.load(row_factors_ptr + row, mask=mask, other=0.0)
    column_factor = tl.load(column_factors_ptr + row // height * width + column, mask=mask, other=0.0)
    scaled = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32) * grad_scale
    step = row_factor * column_factor * scaled * tl.load(factor_ptr)
    master = _load_master(weight_ptr, residue_ptr, at, mask, MASTER)
    master = master - (step + master * decay)
    random = _random(block + start_block, lane, key_low, key_high)
    _store_master(master, weight_ptr, residue_ptr, at, mask, random, MASTER)
