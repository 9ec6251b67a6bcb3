"""CUDA: one stream a lane, events as fences, pinned host memory.

Host planes are pages of our own (``pages.py``), registered: ten times faster than the pinned allocator and never rounded up
to a power of two (measured: 0.07 against 0.6 s/GiB). A registration that fails (RLIMIT_MEMLOCK, a container) costs speed, not
the run: one warning, and the sticky error is taken off the context. The only file that names ``torch.cuda``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerferry.backends.base import Fence, Lane
from layerferry.backends.cpu import HostMark
from layerferry.backends.pages import Pages, host_pages
from layerferry.backends.pinning import Pinning
from layerferry.config import allocator_is_configured

log = logging.getLogger(__name__)

SEGMENT_PAGE = 20 << 20
"""Bytes by which segments of torch's allocator grow."""


class CudaFence:
    """An event on a stream."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaMark:
    """A timed event on a stream."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def since(self, other: CudaMark) -> float:
        self.event.synchronize()
        return float(other.event.elapsed_time(self.event)) / 1e3


class HostFence:
    """A point in a host thread: passed by whoever has heard of it."""

    __slots__ = ()

    def synchronize(self) -> None:
        return None


def _grow_segments() -> None:
    """Let the allocator grow its segments: micro-batches of other sizes leave no holes that nothing fits into (14B with 134 of
    139 GiB planned: 4 GiB in holes, and an allocation of 2.3 failed). A user's own settings stay."""
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is not None and not allocator_is_configured():
        setter("expandable_segments:True")


class CudaBackend:
    """One CUDA device. The compute lane is its default stream, where every thread works that has not said otherwise."""

    name = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        _grow_segments()
        self._streams = {
            Lane.UPLOAD: torch.cuda.Stream(self.device),  # type: ignore[no-untyped-call]
            Lane.COMPUTE: torch.cuda.default_stream(self.device),
            Lane.DOWNLOAD: torch.cuda.Stream(self.device),  # type: ignore[no-untyped-call]
            # first in the queue: what it computes is little, and a worker and later a feed wait for it
            Lane.SIDE: torch.cuda.Stream(self.device, priority=-1),  # type: ignore[no-untyped-call]
        }
        self._can_pin = True
        self._pinning = Pinning(self._register, self._unregister)

    # ---------------------------------------------------------------- memory

    def host_buffer(self, num_bytes: int, *, travels: bool) -> Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        buffer, pages = host_pages(num_bytes)
        if travels and self._can_pin:
            self._pin(pages, buffer)
        return buffer

    def _pin(self, pages: Pages, buffer: Tensor) -> None:
        code = self._pinning.pin(buffer.data_ptr(), buffer.numel())
        if code == 0:
            # TRAP: pages that are unmapped while registered poison whatever is mapped there next (tests/gpu/test_backend_cuda.py)
            pages.before_unmapping = partial(self._pinning.unpin, buffer.data_ptr(), buffer.numel())
            return
        self._can_pin = False
        log.warning(
            "cannot pin %.2f GiB of host memory (CUDA error %d): copies run unpinned and slower; raise `ulimit -l`",
            buffer.numel() / 2**30,
            code,
        )
        with suppress(RuntimeError):  # TRAP: the failed call stays the context's last error, blamed on the next kernel
            torch.zeros(1, device=self.device)

    def _register(self, address: int, num_bytes: int) -> int:
        with torch.cuda.device(self.device):
            return int(_runtime().cudaHostRegister(address, num_bytes, 0))

    def _unregister(self, address: int) -> None:
        """When no copy of these pages is under way."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            _runtime().cudaHostUnregister(address)

    def device_buffer(self, num_bytes: int) -> Tensor:
        """TRAP: zeros are written by the compute lane. Where another process has the multiprocessors, an upload, which needs none
        of them, is there first, and the zeros come down on it."""
        compute = self._streams[Lane.COMPUTE]
        with torch.cuda.stream(compute):
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        zeroed = compute.record_event()
        for lane in (Lane.UPLOAD, Lane.DOWNLOAD, Lane.SIDE):
            self._streams[lane].wait_event(zeroed)
        return buffer

    # ---------------------------------------------------------------- lanes

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        host = source if source.device.type == "cpu" else target
        with torch.cuda.stream(self._streams[lane]):
            pieces = self._pinning.pieces(host.data_ptr(), host.nbytes)
            if len(pieces) == 1:
                target.copy_(source, non_blocking=True)
                return
            to, of = (one.view(-1).view(torch.uint8) for one in (target, source))
            for piece in pieces:
                to[piece].copy_(of[piece], non_blocking=True)

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._streams[lane]):
            work()

    def record(self, lane: Lane) -> Fence:
        if lane is Lane.HOST:
            return HostFence()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._streams[lane])
        return CudaFence(event)

    def wait(self, lane: Lane, fence: Fence) -> None:
        if isinstance(fence, HostFence):
            return
        assert isinstance(fence, CudaFence)
        self._streams[lane].wait_event(fence.event)

    def touch(self, lane: Lane, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        return None

    def release(self, buffer: Tensor) -> None:
        return None

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """cuDNN's attention first: measured 440-635 TFLOP/s forward on an H200, about twice the flash backend of torch.

        Buffers of what breaks off in here go back to the compute lane's allocator: it waits for whoever still copies them."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        compute = self._streams[Lane.COMPUTE]
        try:
            with (
                torch.cuda.stream(compute),
                sdpa_kernel(order, set_priority=True),
                torch.random.fork_rng(devices=[self.device]),
            ):
                yield
        except BaseException:
            for lane in (Lane.UPLOAD, Lane.DOWNLOAD, Lane.SIDE):
                compute.wait_stream(self._streams[lane])
            raise

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)
        torch.cuda.default_generators[self.device.index].manual_seed(value)

    # ---------------------------------------------------------------- measurements

    def mark(self, lane: Lane) -> HostMark | CudaMark:
        if lane is Lane.HOST:
            return HostMark(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._streams[lane])
        return CudaMark(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    def limit_memory(self, num_bytes: int | None) -> None:
        """The allocator looks at what it is asked for and takes whole pages: the last one may go beyond its limit."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        most = total if num_bytes is None else num_bytes - min(SEGMENT_PAGE, num_bytes // 100)
        torch.cuda.set_per_process_memory_fraction(min(most / total, 1.0), self.device)

    def reserved_bytes(self) -> int:
        """Most bytes that the allocator has taken from the device since the last ``reset_peak``: the peak, and holes."""
        return int(torch.cuda.max_memory_reserved(self.device))

    def drop_workspaces(self) -> None:
        """Free the matrix libraries' workspaces and cached blocks, as in a new process."""
        self.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    # ---------------------------------------------------------------- the machine

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device: what the driver reports, and what torch's allocator keeps without using it."""
        free, total = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free) + int(kept), int(total)

    @property
    def is_unified(self) -> bool:
        """Whether the device computes in the host's memory, having none of its own."""
        return bool(getattr(torch.cuda.get_device_properties(self.device), "is_integrated", False))

    def describe(self) -> str:
        return str(torch.cuda.get_device_name(self.device))

    def link_bytes_per_s(self, num_bytes: int = 1 << 30) -> tuple[float, float]:
        """Measured upload and download rate, each lane alone, over pinned memory."""
        host, device = self.host_buffer(num_bytes, travels=True), self.device_buffer(num_bytes)
        rates = []
        for lane, target, source in ((Lane.UPLOAD, device, host), (Lane.DOWNLOAD, host, device)):
            self.copy(lane, target, source)
            self.synchronize()
            begin = time.perf_counter()
            for _ in range(3):
                self.copy(lane, target, source)
            self.synchronize()
            rates.append(3 * num_bytes / (time.perf_counter() - begin))
        return rates[0], rates[1]

    def links_together_bytes_per_s(self, num_bytes: int = 1 << 30) -> tuple[float, float]:
        """Measured upload and download rate while both lanes run, over pinned memory."""
        host = [self.host_buffer(num_bytes, travels=True) for _ in range(2)]
        device = [self.device_buffer(num_bytes) for _ in range(2)]
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(4):
            self.copy(Lane.UPLOAD, device[0], host[0])
            self.copy(Lane.DOWNLOAD, host[1], device[1])
        rates = []
        for lane in (Lane.UPLOAD, Lane.DOWNLOAD):
            self._streams[lane].synchronize()
            rates.append(4 * num_bytes / (time.perf_counter() - begin))
        return rates[0], rates[1]

    @property
    def can_pin(self) -> bool:
        """Whether the system has let us pin host memory so far."""
        return self._can_pin

    def matmul_flops_per_s(self, rows: int = 16384, inner: int = 4096, columns: int = 16384) -> float:
        """Measured bf16 matrix-multiply rate on random data."""
        a = torch.randn(rows, inner, device=self.device, dtype=torch.bfloat16)
        b = torch.randn(columns, inner, device=self.device, dtype=torch.bfloat16)
        for _ in range(3):
            torch.nn.functional.linear(a, b)
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.linear(a, b)
        self.synchronize()
        return 10 * 2.0 * rows * inner * columns / (time.perf_counter() - begin)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def device_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
