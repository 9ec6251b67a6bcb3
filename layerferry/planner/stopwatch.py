"""The host's rates that take milliseconds to measure: memory traffic, copies, products of matrices.

``probe`` takes them with large sizes and remembers them; a CPU that plays the device and was never probed is timed with small
ones. Checked by ``tests/planner/test_machine.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def triad_bytes_per_s(numel: int) -> float:
    """STREAM's triad a = b + s*c in fp32: 12 bytes an element."""
    b, c = torch.ones(numel), torch.ones(numel)
    a = torch.empty(numel)
    return 12 * numel / best_s(lambda: torch.add(b, c, alpha=3.0, out=a))


def copied_bytes_per_s(numel: int) -> float:
    source, target = torch.ones(numel), torch.ones(numel)
    return 4 * numel / best_s(lambda: target.copy_(source))


def matmul_flops_per_s(side: int) -> float:
    """fp32, which a bf16 model on a CPU comes nearer to than to the rate of its matrix units."""
    a, b = torch.ones(side, side), torch.ones(side, side)
    return 2.0 * side**3 / best_s(lambda: a @ b)


def best_s(function: Callable[[], object], runs: int = 5) -> float:
    """Shortest of a few runs after a first one."""
    function()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)
