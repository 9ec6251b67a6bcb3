"""Fill planes from a checkpoint, parameter by parameter.

What for: loading must peak at the steady state plus one unit (a copy of the whole model, then a second one for pinning, is
how other trainers run out of memory at start). So a parameter is read, handed over and dropped before the next one.
A bounded number of bytes is read ahead on a few threads, because reading, dequantising and splitting the master take turns
otherwise. Left out: where the values go, which the caller's ``set_parameter`` knows.
Checked by ``tests/store/test_fill.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from layerferry.errors import CheckpointError

DEFAULT_READ_AHEAD_BYTES = 1 << 30


class Source(Protocol):
    """Parameters by name, in any dtype, @host."""

    def load(self, name: str) -> Tensor: ...

    def num_bytes(self, name: str) -> int: ...


def fill(
    set_parameter: Callable[[str, Tensor], None],
    source: Source,
    names: Iterable[str],
    *,
    read_ahead_bytes: int = DEFAULT_READ_AHEAD_BYTES,
    num_threads: int = 4,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Call ``set_parameter(name, value)`` on this thread for every name, in the given order; ``value`` is @host, finite.

    ``read_ahead_bytes`` bounds what is in flight beside the parameter that is being set (one unit's bytes are enough; 0 reads one
    at a time). ``progress(name, done_bytes, total_bytes)`` is called after each parameter.
    """
    wanted = list(names)
    sizes = {name: source.num_bytes(name) for name in wanted}
    total_bytes = sum(sizes[name] for name in wanted)
    done_bytes = 0
    pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="fill")
    try:
        waiting = deque(wanted)
        flying: deque[tuple[str, Future[Tensor]]] = deque()
        flying_bytes = 0
        while waiting or flying:
            while waiting and (not flying or flying_bytes + sizes[waiting[0]] <= read_ahead_bytes):
                name = waiting.popleft()
                flying.append((name, pool.submit(source.load, name)))
                flying_bytes += sizes[name]
            name, future = flying.popleft()
            value = future.result()
            del future  # it would keep the tensor until the next round
            check_finite(name, value)
            set_parameter(name, value)
            del value
            flying_bytes -= sizes[name]
            done_bytes += sizes[name]
            if progress is not None:
                progress(name, done_bytes, total_bytes)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check_finite(name: str, value: Tensor) -> None:
    """Refuse a weight that is inf or NaN: one pass without a temporary (minimum and maximum carry NaN along)."""
    if not value.is_floating_point() or not value.numel():
        return
    low, high = torch.aminmax(value)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise CheckpointError(f"{name}: the checkpoint has inf or NaN in it (minimum {low.item()}, maximum {high.item()}).")
