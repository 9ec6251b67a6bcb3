"""200 steps with random delays in every lane give the bits of 200 steps without: no copy depends on luck (FAULTS 19)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import layerferry
from layerferry.backends.base import Fence, Lane
from layerferry.backends.cuda import CudaBackend, device_count
from layerferry.config import Config, ModelConfig
from layerferry.plan import Plan
from tests.gpu.small import batches, model_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]

STEPS = 200
LONGEST_CYCLES = 2_000_000
"""About a millisecond: as long as this model's whole forward of a layer, so that every order of lanes occurs."""


class DelayingBackend(CudaBackend):
    """Puts a pause of random length before every copy and every fence, on the lane that it belongs to, and before the zeros of a
    new buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def _pause(self, lane: Lane) -> None:
        if lane is not Lane.HOST and self._random.random() < 0.3:
            with torch.cuda.stream(self._streams[lane]):
                torch.cuda._sleep(self._random.randrange(LONGEST_CYCLES))

    def device_buffer(self, num_bytes: int) -> Tensor:
        with torch.cuda.stream(self._streams[Lane.COMPUTE]):
            torch.cuda._sleep(LONGEST_CYCLES)
        return super().device_buffer(num_bytes)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        self._pause(lane)
        super().copy(lane, target, source)

    def record(self, lane: Lane) -> Fence:
        self._pause(lane)
        return super().record(lane)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def masters_after(backend: CudaBackend, plan: Plan) -> dict[str, Tensor]:
    config = Config(model=ModelConfig(model_name_or_path="live"))
    engine = layerferry.load(model_of("llama", torch.bfloat16), config=config, plan=plan, backend=backend)
    for number in range(STEPS):
        engine.step(batches(2, rows=2, tokens=64, seed=number), lr=1e-3)
    engine.settle()
    masters = engine.store.master
    found = {f"{u.name}.{entry.name}": masters(u, entry).cpu() for u in engine.store.units for entry in u.layout.entries}
    engine.close()
    return found


@pytest.mark.parametrize(
    "plan",
    [
        Plan(num_slots=2, num_slabs=1),
        Plan(num_slots=3, num_waves=2, on_device=(1, 2), carry_fp32=True),
        Plan(num_slots=3, num_waves=2, carry_fp32=True, turn_layers=2),
    ],
    ids=["streamed", "waves and units at home", "layers that turn"],
)
def test_delays_change_nothing(plan: Plan, deterministic: None) -> None:
    expected = masters_after(CudaBackend(), plan)
    for seed in (0, 1):
        found = masters_after(DelayingBackend(seed), plan)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
