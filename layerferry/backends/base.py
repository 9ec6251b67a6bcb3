"""The narrow seam between the engine and a device.

A device has four lanes (upload, compute, download, and a side lane for copies and compute that belong to updates) that run beside
each other, and fences between them. A lane runs its
work in the order it was given; nothing else is promised. ``HOST`` stands for the calling thread, so that updates on the CPU
take part in the same order. Everything that the engine knows of streams and events is in this protocol.

``cpu`` is the truth: every call has happened when it returns. ``cuda`` is an optimisation of it. ``chaos`` is ``cpu`` with
copies that land late and with every missing fence reported. Checked by ``tests/backends``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor


class Lane(Enum):
    """Where work is queued."""

    UPLOAD = "upload"
    COMPUTE = "compute"
    DOWNLOAD = "download"
    SIDE = "side"
    HOST = "host"


class Fence(Protocol):
    """A point in a lane. Everything queued on the lane before it has happened once it is passed."""

    def synchronize(self) -> None:
        """Block the calling thread until the fence is passed."""
        ...


class Mark(Protocol):
    """A moment in a lane, readable once the lane has passed it."""

    def since(self, other: Any) -> float:
        """Seconds from ``other``, a mark of the same backend and kind of lane, to this one."""
        ...


class Backend(Protocol):
    """A device with lanes. Methods may be called from any thread."""

    name: str
    device: torch.device

    def host_buffer(self, num_bytes: int, *, travels: bool) -> Tensor:
        """Zeroed uint8 [num_bytes] @host, 64-byte aligned, exactly that large; pinned where ``travels`` and the system
        allows."""
        ...

    def device_buffer(self, num_bytes: int) -> Tensor:
        """Zeroed uint8 [num_bytes] @device in a storage of its own: zeros for whatever is queued from now on, on any lane."""
        ...

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        """Queue ``target[:] = source`` on ``lane``; both flat uint8 of one length."""
        ...

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """Queue ``work``, which computes @device, on ``lane``; it allocates nothing that outlives it. Buffers that it uses are
        declared with ``touch``."""
        ...

    def record(self, lane: Lane) -> Fence:
        """A fence behind everything queued on ``lane`` so far."""
        ...

    def wait(self, lane: Lane, fence: Fence) -> None:
        """Let work queued on ``lane`` from now on begin only when ``fence`` is passed. Does not block the caller."""
        ...

    def touch(self, lane: Lane, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Declare that ``lane`` uses these buffers from here to its next fence: what ``chaos`` checks, nothing elsewhere."""
        ...

    def release(self, buffer: Tensor) -> None:
        """The compute lane is done with the contents of ``buffer``; ``chaos`` fills it with NaN."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """A small input (ids, labels, positions) @device, ordered before later compute."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Compute belongs in here: it goes to the compute lane, whatever the caller is at, the right kernels of torch are chosen,
        and the caller's random generators do not notice."""
        ...

    def seed(self, value: int) -> None:
        """Seed the generators that layers draw from (dropout, sampling routers)."""
        ...

    def mark(self, lane: Lane) -> Mark:
        """A moment in ``lane``: when everything queued so far has run."""
        ...

    def synchronize(self) -> None:
        """Block until every lane is empty."""
        ...

    def peak_bytes(self) -> int:
        """Largest number of bytes allocated @device since the last ``reset_peak``; 0 where that is not known."""
        ...

    def reset_peak(self) -> None: ...

    def allocated_bytes(self) -> int:
        """Bytes allocated @device now; 0 where that is not known."""
        ...

    def limit_memory(self, num_bytes: int | None) -> None:
        """From here on allocations that would take more than ``num_bytes`` from the device (None: than it has) fail with
        ``torch.OutOfMemoryError``, what the allocator keeps unused included. It holds for the process; where bytes are not
        counted it says nothing."""
        ...

    def drop_workspaces(self) -> None:
        """Free what libraries hold @device beside tensors, so that the next use shows its size."""
        ...
