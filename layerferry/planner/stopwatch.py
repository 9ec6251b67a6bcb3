"""Rates that take milliseconds to measure: memory traffic, copies, products of matrices, a device's links.

``probe`` takes them with large sizes and remembers them; a machine that was never probed is timed with small ones.
Checked by ``tests/planner/test_machine.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from layerferry.backends.base import Lane
from layerferry.backends.cuda import CudaBackend

LEAST_S = 0.05
"""Spent on each number."""


def triad_bytes_per_s(numel: int) -> float:
    """STREAM's triad a = b + s*c in fp32: 12 bytes an element."""
    b, c = torch.ones(numel), torch.ones(numel)
    a = torch.empty(numel)
    return 12 * numel / best_s(lambda: torch.add(b, c, alpha=3.0, out=a))


def copied_bytes_per_s(numel: int) -> float:
    source, target = torch.ones(numel), torch.ones(numel)
    return 4 * numel / best_s(lambda: target.copy_(source))


def matmul_flops_per_s(side: int) -> float:
    """In bf16, as models are trained unless the user asks for fp32; CPUs differ more in it than in anything else."""
    a, b = (torch.ones(side, side, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * side**3 / best_s(lambda: a @ b)


def links(backend: CudaBackend, num_bytes: int) -> dict[str, float]:
    up, down = backend.link_bytes_per_s(num_bytes)
    both_up, both_down = backend.links_together_bytes_per_s(num_bytes)
    return {
        "upload_bytes_per_s": up,
        "download_bytes_per_s": down,
        "upload_together_bytes_per_s": both_up,
        "download_together_bytes_per_s": both_down,
    }


def device_traffic(backend: CudaBackend, num_bytes: int) -> dict[str, float]:
    """A copy @device reads and writes every byte."""
    repeats = 10
    source, target = backend.device_buffer(num_bytes), backend.device_buffer(num_bytes)

    def copy() -> None:
        for _ in range(repeats):
            backend.copy(Lane.COMPUTE, target, source)
        backend.synchronize()

    return {"device_bytes_per_s": 2 * repeats * num_bytes / best_s(copy, runs=3)}


def best_s(function: Callable[[], object], runs: int = 5) -> float:
    """Shortest of a few runs after a first one; of many where they are short, since other processes come between."""
    function()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < runs or time.perf_counter() - begin < LEAST_S:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
