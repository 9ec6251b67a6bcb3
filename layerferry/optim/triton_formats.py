"""Any rule in any format for planes on a CUDA device: the Triton source of ``TritonKernels.update``.

The pass of ``native/formats.cpp``: a tile of whole blocks is read into registers as fp32, stepped and stored. The operations
are the same in the same order, integers for the codes and the random numbers, so the bits are the CPU's. Which planes there
are and what they hold is known when a kernel is compiled. Imported when a device plane is first stepped, because it needs
Triton to be read. Checked by ``tests/gpu/test_device_formats.py`` against the CPU kernels, bit for bit.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from layerferry.optim.triton_adamw import _updated


@triton.jit
def _hashed(x):
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _random(block, lane, key_low, key_high):
    key = _hashed(block.to(tl.uint32) + tl.cast(key_low, tl.uint32))
    key = _hashed(key + (block >> 32).to(tl.uint32) + tl.cast(key_high, tl.uint32))
    factor = _hashed(key + 0x9E3779B9) | 1
    word = (_hashed(lane.to(tl.uint32) * 0x9E3779B9)[None, :] ^ key[:, None]) * factor[:, None]
    return word ^ (word >> 16)


@triton.jit
def _load_moment(ptr, exponents_ptr, at, block, inside, CODED: tl.constexpr, SIGNED: tl.constexpr):
    if CODED:
        code = tl.load(ptr + at, mask=inside[:, None], other=0).to(tl.int32)
        base = (tl.load(exponents_ptr + block, mask=inside, other=0).to(tl.int32) + 1) << 23
        magnitude = code & 0x7F if SIGNED else code
        bits = tl.where(magnitude > 0, (magnitude << 20) + base[:, None], 0)
        if SIGNED:
            bits = bits | ((code & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = tl.load(ptr + at, mask=inside[:, None], other=0.0)
    return value


@triton.jit
def _store_moment(
    value, ptr, exponents_ptr, at, block, inside, random, OCTAVES: tl.constexpr, CODED: tl.constexpr, SIGNED: tl.constexpr
):  # fmt: skip
    if CODED:
        bits = tl.where(value != value, 0x7FC00000, value.to(tl.int32, bitcast=True))
        size = bits & 0x7FFFFFFF
        largest = tl.max(size, axis=1)
        exponent = tl.maximum(((largest + 0xFFFFF) >> 23) - OCTAVES, 0)
        code = ((size.to(tl.uint32) + random) >> 20).to(tl.int32) - ((exponent + 1) << 3)[:, None]
        signed, unsigned = tl.maximum(code, 0) | tl.where(bits < 0, 0x80, 0), tl.maximum(code, tl.where(size > 0, 1, 0))
        code = signed if SIGNED else unsigned
        tl.store(ptr + at, code.to(tl.uint8), mask=inside[:, None])
        tl.store(exponents_ptr + block, exponent.to(tl.uint8), mask=inside)
    else:
        tl.store(ptr + at, value, mask=inside[:, None])


@triton.jit
def _load_master(weight_ptr, residue_ptr, at, mask, MASTER: tl.constexpr):
    if MASTER == 0:
        master = tl.load(weight_ptr + at, mask=mask, other=0.0)
    else:
        bits = tl.load(weight_ptr + at, mask=mask, other=0).to(tl.int32) << 16
        if MASTER == 1:
            bits += tl.load(residue_ptr + at, mask=mask, other=0).to(tl.int32)
        if MASTER == 2:
            bits += tl.load(residue_ptr + at, mask=mask, other=0).to(tl.int32) << 8
        master = bits.to(tl.float32, bitcast=True)
    return master


@triton.jit
def _store_master(master, weight_ptr, residue_ptr, at, mask, random, MASTER: tl.constexpr):
    if MASTER == 0:
        tl.store(weight_ptr + at, master, mask=mask)
    else:
        bits = tl.where(master != master, 0x7FC00000, master.to(tl.int32, bitcast=True))
        if MASTER == 1:
            high = (bits + 0x8000) >> 16
            tl.store(residue_ptr + at, (bits - (high << 16)).to(tl.int16), mask=mask)
            tl.store(weight_ptr + at, high.to(tl.int16), mask=mask)
        if MASTER == 2:
            kept = (bits.to(tl.uint32, bitcast=True) + ((random >> 4) & 0xFF)) >> 8
            upper = (kept + 0x80) >> 8
            tl.store(residue_ptr + at, (kept - (upper << 8)).to(tl.int8), mask=mask)
            tl.store(weight_ptr + at, upper.to(tl.int16), mask=mask)
        if MASTER == 3:
            rounded = (bits.to(tl.uint32, bitcast=True) + (random & 0xFFFF)) >> 16
            tl.store(weight_ptr + at, rounded.to(tl.int16), mask=mask)


@triton.jit(do_not_specialize=["num_blocks", "start_block", "key_low", "key_high"])
def update(
    weight_ptr, residue_ptr, grad_ptr, first_ptr, first_exponents_ptr, second_ptr, second_exponents_ptr,
    num_blocks, start_block, key_low, key_high,
    n0, n1, n2, n3, n4, n5, n6, n7, n8,
    RULE: tl.constexpr, MASTER: tl.constexpr, HAS_FIRST: tl.constexpr, FIRST_CODED: tl.constexpr, SECOND_CODED: tl.constexpr,
    SMALLEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    inside = block < num_blocks
    at = block[:, None] * BLOCK + lane[None, :]
    mask = inside[:, None] & (lane >= 0)[None, :]
    random = _random(block + start_block, lane, key_low, key_high)
    if RULE != 3:
        master = _load_master(weight_ptr, residue_ptr, at, mask, MASTER)
    scaled = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32) * n0
    if RULE == 0:
        m = _load_moment(first_ptr, first_exponents_ptr, at, block, inside, FIRST_CODED, True)
        v = _load_moment(second_ptr, second_exponents_ptr, at, block, inside, SECOND_CODED, False)
        master, m, v = _updated(master, scaled, m, v, 1.0, n1, n2, n3, n4, n5, n6, n7, n8, SMALLEST)
        _store_moment(m, first_ptr, first_exponents_ptr, at, block, inside, random >> 12, 16, FIRST_CODED, True)
        _store_moment(v, second_ptr, second_exponents_ptr, at, block, inside, random & 0xFFFFF, 32, SECOND_CODED, False)
    if RULE == 1:
        m = _load_moment(first_ptr, first_exponents_ptr, at, block, inside, FIRST_CODED, True)
        blend = m * n1 + scaled * n2
        step = tl.where(blend > 0.0, n5, tl.where(blend < 0.0, -n5, blend + 0.0))
        m = m * n3 + scaled * n4
        m = tl.where(tl.abs(m) < SMALLEST, 0.0, m)
        master = master - (step + master * n6)
        _store_moment(m, first_ptr, first_exponents_ptr, at, block, inside, random >> 12, 16, FIRST_CODED, True)
    if RULE == 2:
        scaled = scaled + master * n3
        if HAS_FIRST:
            m = _load_moment(first_ptr, first_exponents_ptr, at, block, inside, FIRST_CODED, True)
            scaled = m * n1 + scaled
            scaled = tl.where(tl.abs(scaled) < SMALLEST, 0.0, scaled)
            _store_moment(scaled, first_ptr, first_exponents_ptr, at, block, inside, random >> 12, 16, FIRST_CODED, True)
        master = master - scaled * n2
    if RULE == 3:
        m = _load_moment(first_ptr, first_exponents_ptr, at, block, inside, FIRST_CODED, True)
        blend = scaled * n2
        m = m * n1 + blend
        m = tl.where(tl.abs(m) < SMALLEST, 0.0, m)
        nearest = (blend + m * n1).to(tl.bfloat16)
        tl.store(grad_ptr + at, nearest.to(grad_ptr.dtype.element_ty), mask=mask)
        _store_moment(m, first_ptr, first_exponents_ptr, at, block, inside, random >> 12, 16, FIRST_CODED, True)
    if RULE == 4:
        master = master - (scaled + master * n1)
    if RULE != 3:
        _store_master(master, weight_ptr, residue_ptr, at, mask, random, MASTER)
