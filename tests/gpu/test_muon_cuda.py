"""Muon on a CUDA device: Newton-Schulz beside fp64 and the CPU, its bytes, and units in any place with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerferry.backends.base import Lane
from layerferry.backends.cuda import CudaBackend, device_count
from layerferry.config import OptimConfig
from layerferry.engine.sizes import orthogonal_bytes
from layerferry.layout import Layout, ParameterSpec
from layerferry.optim.orthogonal import COEFFICIENTS, NUM_STEPS, Stack, orthogonalise, stacks_of
from layerferry.plan import Plan
from layerferry.planner.updates import LANE_WORKSPACE_BYTES
from tests.conformance.harness import relative
from tests.gpu.small import assert_places_do_not_matter, batches, engine_of, model_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]


def stack_of(*shape: int) -> Stack:
    (stack,) = stacks_of(Layout.of([ParameterSpec(name="w", shape=shape, dtype=torch.bfloat16, matrix=True)]))
    return stack


def exact(values: Tensor) -> Tensor:
    """The same iteration in fp64."""
    a, b, c = COEFFICIENTS
    x = values.double()
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x) / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


@pytest.mark.parametrize("shape", [(512, 512), (256, 1024), (1024, 256), (8, 128, 384), (5, 384, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_newton_schulz_errs_as_on_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Both round every product to bf16; sums inside a product have another order, which fp32 hides. So each is about as far from
    fp64, and they are no further apart than both errors together."""
    stack = stack_of(*shape)
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        values = given.to(device=device, dtype=dtype, copy=True)
        orthogonalise(stack, values.view(-1), torch.zeros(stack.workspace_bytes(dtype), dtype=torch.uint8, device=device))
        found.append(values.cpu())
    here, there = (relative(values, exact(given)) for values in found)
    assert there < 1.5 * here + 2.0**-9
    assert relative(found[1], found[0]) < here + there


def test_the_side_lane_takes_what_was_counted() -> None:
    """Values, workspace, what the library keeps for a stream, and norms: a few numbers."""
    backend, stack = CudaBackend(), stack_of(2048, 4096)
    landing = backend.device_buffer(stack.numel * 2)
    workspace = backend.device_buffer(stack.workspace_bytes(torch.bfloat16))
    backend.synchronize()
    backend.reset_peak()
    before = backend.allocated_bytes()
    backend.run(Lane.SIDE, lambda: orthogonalise(stack, landing.view(torch.bfloat16), workspace))
    backend.synchronize()
    assert backend.peak_bytes() - before <= LANE_WORKSPACE_BYTES + (1 << 20)
    backend.reset_peak()
    before = backend.allocated_bytes()
    backend.run(Lane.SIDE, lambda: orthogonalise(stack, landing.view(torch.bfloat16), workspace))
    backend.synchronize()
    assert backend.peak_bytes() - before <= 1 << 20


@pytest.mark.parametrize("optim", ["muon", "muon_8bit"])
def test_units_may_live_on_the_device_without_changing_a_bit(optim: str) -> None:
    assert_places_do_not_matter(OptimConfig(optim=optim))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_an_engine_trains_and_holds_what_was_counted(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    engine = engine_of(model, Plan(num_slots=2), optim=OptimConfig(optim="muon"))
    landing, working = orthogonal_bytes(engine.store.units, engine.store.specs, engine.store.on_device)
    assert landing > 0 and working > landing
    losses = [engine.step(batches(seed=0), lr=1e-3).loss for _ in range(6)]
    engine.settle()
    assert losses[-1] < losses[0]
    assert all(bool(engine.store.master(u, e).isfinite().all()) for u in engine.store.units for e in u.layout.entries)
    engine.close()
