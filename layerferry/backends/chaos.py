"""The cpu backend made hostile: every legal order, late copies, NaN in what was released, and a race detector.

Two independent checks, because each is blind where the other sees:

* **Late copies.** A copy is queued, not done, and so is what a lane is given to ``run``, and the zeros of a new buffer. It
  happens when something that waits for it needs it, or at a random moment before (seeded). A reader that does not wait finds
  the old bytes, or the NaN that ``release`` left, or that a new buffer holds. Other compute is done at once, behind what its
  lane was given, so a copy that lands *too early* on a real device cannot be seen this way.
* **Vector clocks.** Lanes and threads carry clocks; fences pass them on (C. Fidge, "Timestamps in message-passing systems
  that preserve the partial ordering", 1988). Two uses of one buffer, one of them a write, that no chain of fences orders
  raise ``RaceError``, whether or not this run happened to get away with it. So does memory that is freed while a copy may still
  be under way there: the compute lane would be given it next. What is queued keeps its memory alive, so to find every such
  fault takes an ``eagerness`` of 1.

Checked by ``tests/backends/test_chaos.py``: engines with one fence removed are caught.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerferry.backends.base import Fence, Lane
from layerferry.backends.cpu import CpuBackend

Clock = dict[str, int]


class RaceError(AssertionError):
    """Two uses of a buffer that no fence orders: a fault of the engine, never of the user."""


@dataclass
class ChaosFence:
    """A point in a lane: ``ticket`` counts the lane's queued work, ``clock`` is the lane's knowledge there."""

    backend: ChaosBackend
    lane: Lane
    ticket: int
    clock: Clock

    def synchronize(self) -> None:
        self.backend.pass_fence(self)


@dataclass
class _Copy:
    ticket: int
    target: Tensor
    source: Tensor


@dataclass
class _Work:
    ticket: int
    work: Callable[[], None]


@dataclass
class _Wait:
    ticket: int
    fence: ChaosFence


@dataclass
class _Uses:
    """Last uses of some bytes of a buffer: the actor and its clock value; reads since the last write."""

    begin: int
    end: int
    write: tuple[str, int, str] | None = None
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)


class ChaosBackend(CpuBackend):
    """See the module docstring. ``eagerness`` is the chance that a queued operation happens at any backend call."""

    name = "chaos"

    def __init__(self, seed: int = 0, eagerness: float = 0.2) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._lock = threading.RLock()
        self._queues: dict[Lane, deque[_Copy | _Work | _Wait]] = {lane: deque() for lane in Lane}
        self._tickets = dict.fromkeys(Lane, 0)
        self._clocks: dict[str, Clock] = {}
        self._uses: dict[int, list[_Uses]] = {}  # by address of a storage that is alive
        self._freed: deque[int] = deque()
        """Addresses of storages that are not, and have not been looked at: they die in any thread, inside any line."""

    def device_buffer(self, num_bytes: int) -> Tensor:
        """As on CUDA, the compute lane writes the zeros, and the other lanes wait for it."""
        buffer = super().device_buffer(num_bytes).fill_(0xFF)

        def zero() -> None:
            buffer.zero_()

        with self._lock:
            self._order(Lane.COMPUTE, "zeros", writes=(buffer,))
            self.run(Lane.COMPUTE, zero)
            zeroed = self.record(Lane.COMPUTE)
            for lane in (Lane.UPLOAD, Lane.DOWNLOAD, Lane.SIDE):
                self.wait(lane, zeroed)
        return buffer

    def computing(self) -> AbstractContextManager[None]:
        self._catch_up(Lane.COMPUTE)
        return super().computing()

    # ---------------------------------------------------------------- queued work

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        with self._lock:
            self._order(lane, "copy", reads=(source,), writes=(target,))
            self._tickets[lane] += 1
            self._queues[lane].append(_Copy(self._tickets[lane], target, source))
            self._stir()

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        with self._lock:
            self._tickets[lane] += 1
            self._queues[lane].append(_Work(self._tickets[lane], work))
            self._stir()

    def record(self, lane: Lane) -> Fence:
        with self._lock:
            actor = self._actor(lane)
            if lane is not Lane.HOST:
                self._join(actor, self._clock(self._actor(Lane.HOST)))  # queued from this thread, so after its past
            clock = self._clock(actor)
            fence = ChaosFence(self, lane, self._tickets[lane], dict(clock))
            clock[actor] += 1
            self._stir()
            return fence

    def wait(self, lane: Lane, fence: Fence) -> None:
        assert isinstance(fence, ChaosFence)
        with self._lock:
            self._look_at_freed()
            self._join(self._actor(lane), fence.clock)
            if lane in (Lane.COMPUTE, Lane.HOST):
                self._run_until(fence.lane, fence.ticket)
            else:
                self._tickets[lane] += 1
                self._queues[lane].append(_Wait(self._tickets[lane], fence))
            self._stir()

    def pass_fence(self, fence: ChaosFence) -> None:
        with self._lock:
            self._look_at_freed()
            self._join(self._actor(Lane.HOST), fence.clock)
            self._run_until(fence.lane, fence.ticket)

    def synchronize(self) -> None:
        with self._lock:
            for lane in Lane:
                self.pass_fence(ChaosFence(self, lane, self._tickets[lane], dict(self._clock(self._actor(lane)))))

    def _catch_up(self, lane: Lane) -> None:
        with self._lock:
            self._run_until(lane, self._tickets[lane])

    def _stir(self) -> None:
        for lane in self._random.sample(list(Lane), len(Lane)):
            if self._queues[lane] and self._random.random() < self._eagerness:
                self._run_until(lane, self._queues[lane][0].ticket)

    def _run_until(self, lane: Lane, ticket: int) -> None:
        queue = self._queues[lane]
        while queue and queue[0].ticket <= ticket:
            work = queue[0]
            if isinstance(work, _Wait):
                self._run_until(work.fence.lane, work.fence.ticket)
            elif isinstance(work, _Work):
                work.work()
            else:
                work.target.copy_(work.source)
            queue.popleft()

    # ---------------------------------------------------------------- NaN and clocks

    def release(self, buffer: Tensor) -> None:
        with self._lock:
            self._catch_up(Lane.COMPUTE)
            self._order(Lane.COMPUTE, "release", writes=(buffer,))
        buffer.fill_(0xFF)  # every 0xFF pattern is a NaN in bf16 and in fp32

    def touch(self, lane: Lane, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        with self._lock:
            self._order(lane, "use", reads=reads, writes=writes)
            if lane is Lane.COMPUTE:  # what follows is done at once
                self._catch_up(lane)
            self._stir()

    def _actor(self, lane: Lane) -> str:
        return f"thread {threading.get_ident()}" if lane is Lane.HOST else lane.value

    def _clock(self, actor: str) -> Clock:
        return self._clocks.setdefault(actor, {actor: 1})

    def _join(self, actor: str, other: Clock) -> None:
        clock = self._clock(actor)
        for name, count in other.items():
            clock[name] = max(clock.get(name, 0), count)

    def _order(self, lane: Lane, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        self._look_at_freed()
        actor = self._actor(lane)
        if lane is not Lane.HOST:
            self._join(actor, self._clock(self._actor(Lane.HOST)))
        clock = self._clock(actor)

        def before(other: str, count: int) -> bool:
            return other == actor or clock.get(other, 0) >= count

        for buffers, writing in ((reads, False), (writes, True)):
            for buffer in filter(Tensor.numel, buffers):  # empty ones share an address
                known = self._uses_of(buffer.untyped_storage())
                begin = int(buffer.storage_offset()) * buffer.itemsize
                end = begin + buffer.numel() * buffer.itemsize
                for uses in known:
                    if uses.begin < end and begin < uses.end:
                        self._check(actor, what, uses, before, writing=writing)
                if writing:  # everything inside was before
                    known[:] = [uses for uses in known if uses.begin < begin or end < uses.end]
                    known.append(_Uses(begin, end, write=(actor, clock[actor], what)))
                    continue
                own = next((uses for uses in known if (uses.begin, uses.end) == (begin, end)), None)
                if own is None:
                    own = _Uses(begin, end)
                    known.append(own)
                own.reads[actor] = (clock[actor], what)

    def _uses_of(self, storage: torch.UntypedStorage) -> list[_Uses]:
        address = storage.data_ptr()
        if address not in self._uses:
            self._uses[address] = []
            weakref.finalize(storage, self._freed.append, address).atexit = False
        return self._uses[address]

    def _look_at_freed(self) -> None:
        """Memory goes back to the compute lane: it, or a thread that has waited, must know that all uses have ended."""
        while self._freed:
            seen: Clock = {}
            for actor in (Lane.COMPUTE.value, *(name for name in self._clocks if name.startswith("thread "))):
                for name, count in self._clock(actor).items():
                    seen[name] = max(seen.get(name, 0), count)
            for uses in self._uses.pop(self._freed.popleft()):
                last = ({} if uses.write is None else {uses.write[0]: uses.write[1:]}) | uses.reads
                for other, (count, how) in last.items():
                    if seen.get(other, 0) < count:
                        raise RaceError(f"memory was freed with no fence after the {how} for which {other} uses it")

    def _check(self, actor: str, what: str, uses: _Uses, before: Callable[[str, int], bool], *, writing: bool) -> None:
        if uses.write is not None and not before(uses.write[0], uses.write[1]):
            raise RaceError(f"{actor} {what}: no fence after the {uses.write[2]} that {uses.write[0]} wrote")
        for other, (count, how) in uses.reads.items() if writing else ():
            if not before(other, count):
                raise RaceError(f"{actor} {what}: no fence after the {how} by which {other} reads")


def is_released(tensor: Tensor) -> bool:
    """Whether a float tensor holds the NaN that ``release`` leaves, in every element."""
    return bool(torch.isnan(tensor).all())
