"""The device's AdamW gives the bits of the CPU's, and units may live anywhere without changing a run."""

from __future__ import annotations

import pytest
import torch

from layerferry.backends.cuda import device_count
from layerferry.optim.device_kernels import device_kernels
from layerferry.optim.reference import ReferenceKernels
from layerferry.optim.rules import AdamWScalars
from tests.gpu.small import assert_places_do_not_matter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]


@pytest.mark.parametrize("numel", [1, 1023, 1024 * 700 + 13])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_as_the_cpu(numel: int, grad_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    weight = torch.randn(numel, generator=generator).to(torch.bfloat16)
    residue = torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(torch.int16)
    m, v = torch.zeros(numel), torch.zeros(numel)
    ours = [t.cuda() for t in (weight, residue, m, v)]
    for step in range(1, 6):
        grad = (torch.randn(numel, generator=generator) * 10.0 ** (step - 5)).to(grad_dtype)
        scalars = AdamWScalars.of(lr=3e-3, step=step, grad_scale=0.37, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        ReferenceKernels().adamw_split(weight, residue, grad, m, v, scalars=scalars, threads=1)
        device_kernels().adamw_split(ours[0], ours[1], grad.cuda(), ours[2], ours[3], scalars=scalars, threads=1)
    for expected, found in zip((weight.view(torch.int16), residue, m, v), ours, strict=True):
        assert torch.equal(found.cpu().view(expected.dtype), expected)


def test_units_may_live_on_the_device_without_changing_a_bit() -> None:
    assert_places_do_not_matter()
