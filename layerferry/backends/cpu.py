"""The truth: every call has happened when it returns. The specification of the other backends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from layerferry.backends.base import Fence, Lane


class PassedFence:
    """A fence that was passed before it was made."""

    __slots__ = ()

    def synchronize(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class HostMark:
    """A moment on the host's clock."""

    seconds: float

    def since(self, other: HostMark) -> float:
        return self.seconds - other.seconds


class CpuBackend:
    """Host memory plays the device; copies are immediate."""

    name = "cpu"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def host_buffer(self, num_bytes: int, *, travels: bool) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        work()

    def record(self, lane: Lane) -> Fence:
        return PassedFence()

    def wait(self, lane: Lane, fence: Fence) -> None:
        return None

    def touch(self, lane: Lane, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        return None

    def release(self, buffer: Tensor) -> None:
        return None

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def computing(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[])

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def mark(self, lane: Lane) -> HostMark:
        return HostMark(time.perf_counter())

    def synchronize(self) -> None:
        return None

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        return None

    def allocated_bytes(self) -> int:
        return 0

    def limit_memory(self, num_bytes: int | None) -> None:
        return None

    def drop_workspaces(self) -> None:
        return None
