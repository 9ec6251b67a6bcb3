"""The Triton source of ``device_kernels.py``. Imported when a device plane is first stepped, because it needs Triton to be read.

Scalars are fp32 and in the order of ``AdamWScalars``. Offsets are 64-bit: a plane may hold more than 2**31 elements.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _updated(
    master, grad, m, v, grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bc2, eps, step_size, decay,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    scaled = grad * grad_scale
    m = m * beta1 + scaled * one_minus_beta1
    v = v * beta2 + scaled * one_minus_beta2 * scaled
    m = tl.where(tl.abs(m) < SMALLEST, 0.0, m)
    v = tl.where(tl.abs(v) < SMALLEST, 0.0, v)
    denominator = tl.sqrt_rn(v) * rsqrt_bc2 + eps
    master = master - (tl.div_rn(m, denominator) * step_size + master * decay)
    return master, m, v


@triton.jit
def adamw_split(
    weight_ptr, residue_ptr, grad_ptr, m_ptr, v_ptr, numel,
    grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bc2, eps, step_size, decay,
    SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    high = tl.load(weight_ptr + at, mask=inside, other=0).to(tl.int32)
    low = tl.load(residue_ptr + at, mask=inside, other=0).to(tl.int32)
    master = ((high << 16) + low).to(tl.float32, bitcast=True)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    master, m, v = _updated(
        master, grad, m, v, grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bc2, eps, step_size, decay, SMALLEST
    )
    bits = tl.where(master != master, 0x7FC00000, master.to(tl.int32, bitcast=True))
    high = (bits + 0x8000) >> 16
    tl.store(weight_ptr + at, high.to(tl.int16), mask=inside)
    tl.store(residue_ptr + at, (bits - (high << 16)).to(tl.int16), mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)


@triton.jit
def adamw_fp32(
    weight_ptr, grad_ptr, m_ptr, v_ptr, numel,
    grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bc2, eps, step_size, decay,
    SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    master = tl.load(weight_ptr + at, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    master, m, v = _updated(
        master, grad, m, v, grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bc2, eps, step_size, decay, SMALLEST
    )
    tl.store(weight_ptr + at, master, mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
