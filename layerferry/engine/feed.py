"""Feed: host weights to slots, ahead of their use.

The engine tells what comes next (``expect``); uploads run as far ahead as there are free slots. ``with feed(unit) as slot``
waits for that unit's upload; leaving returns the slot, and the next expected upload takes it. A slot keeps what it holds
until it is needed for something else, and the content whose next use is furthest away goes first (L. Belady, "A study of
replacement algorithms", 1966; the order of uses is known here): with three slots the turn from forward to backward needs no
upload, and with a slot for every unit weights are resident.

Waiting for a pending update never blocks the caller: the upload hangs on the update's future and is queued by whoever
finishes it. Checked by ``tests/engine/test_feed.py`` and, for every order of events, by the chaos backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from layerferry.backends.base import Backend, Fence, Lane
from layerferry.engine.clock import Clock
from layerferry.engine.deferred import DeferredSteps
from layerferry.layout import WEIGHT
from layerferry.store.store import Store
from layerferry.units import Unit


@dataclass(eq=False)
class Slot:
    """A device buffer that one unit's weights land in. Written by the feed only."""

    buffer: Tensor  # [slot_bytes] uint8 @device
    unit: Unit | None = None
    arrival: Future[Fence] | None = None
    released: Fence | None = None
    claims: int = 0
    """Expected uses that this content will still serve, the present one included."""
    last_use: int = -1


class SlotPool:
    """Slots of one size, and the units that use them."""

    def __init__(self, backend: Backend, *, num_slots: int, slot_bytes: int) -> None:
        self.slots = [Slot(backend.device_buffer(slot_bytes)) for _ in range(num_slots)]
        self.expected: deque[Unit] = deque()
        self.assigned: deque[tuple[Unit, Slot]] = deque()

    def holding(self, unit: Unit) -> Slot | None:
        return next((slot for slot in self.slots if slot.unit is unit), None)

    def victim(self) -> Slot | None:
        """The free slot whose content is needed last, of equals the one that was used longest ago."""
        free = [slot for slot in self.slots if not slot.claims]
        order = list(self.expected)

        def next_use(slot: Slot) -> int:
            return order.index(slot.unit) if slot.unit in order else len(order)

        return max(free, key=lambda slot: (next_use(slot), -slot.last_use), default=None)

    def outdated(self) -> list[Slot]:
        """Slots whose content is of no use once the weights have been stepped."""
        return [slot for slot in self.slots if slot.unit is not None]


class HomePool(SlotPool):
    """Units that live @device: the weight plane is the slot, it is always there, and a step updates it in place."""

    def __init__(self, backend: Backend, store: Store, units: Iterable[Unit]) -> None:
        super().__init__(backend, num_slots=0, slot_bytes=0)
        for unit in units:
            there: Future[Fence] = Future()
            there.set_result(backend.record(Lane.COMPUTE))
            self.slots.append(Slot(store.plane(unit, WEIGHT).buffer, unit, there))

    def outdated(self) -> list[Slot]:
        return []


class Feed:
    """Owns the slots. All calls come from the thread that runs the sweeps."""

    def __init__(
        self, backend: Backend, clock: Clock, store: Store, deferred: DeferredSteps, pool_of: dict[int, SlotPool]
    ) -> None:
        self._backend, self._clock, self._store, self._deferred, self.pool_of = backend, clock, store, deferred, pool_of
        self._uses = 0
        self.uploaded_bytes = 0

    def expect(self, units: Iterable[Unit]) -> None:
        """Say what will be fed next, in order; adds to what was said before."""
        touched = set()
        for unit in units:
            pool = self.pool_of[unit.index]
            pool.expected.append(unit)
            touched.add(pool)
        for pool in touched:
            self._advance(pool)

    def forget(self, *, stale: bool) -> None:
        """Drop every expectation; where ``stale``, also what the slots hold, because the weights @host are about to change."""
        for pool in set(self.pool_of.values()):
            pool.expected.clear()
            pool.assigned.clear()
            for slot in pool.slots:
                slot.claims = 0
            if stale:
                for slot in pool.outdated():
                    self._vacate(slot)

    @contextmanager
    def __call__(self, unit: Unit) -> Iterator[Slot]:
        """The slot that holds ``unit``'s weights, for the compute lane, until the context is left."""
        pool = self.pool_of[unit.index]
        if not pool.assigned or pool.assigned[0][0] is not unit:
            self._unforeseen(pool, unit)
        _, slot = pool.assigned.popleft()
        assert slot.arrival is not None
        with self._clock.waiting("link" if slot.arrival.done() else "optimizer"):
            self._backend.wait(Lane.COMPUTE, slot.arrival.result())
        self._backend.touch(Lane.COMPUTE, reads=[slot.buffer])
        try:
            with self._clock.span(Lane.COMPUTE, unit.name):
                yield slot
        finally:
            slot.released = self._backend.record(Lane.COMPUTE)
            slot.claims -= 1
            slot.last_use = self._uses
            self._uses += 1
            self._advance(pool)

    def _unforeseen(self, pool: SlotPool, unit: Unit) -> None:
        for _, slot in pool.assigned:
            slot.claims -= 1
        pool.assigned.clear()
        pool.expected.clear()
        pool.expected.append(unit)
        self._advance(pool)

    def _advance(self, pool: SlotPool) -> None:
        while pool.expected:
            unit = pool.expected[0]
            slot = pool.holding(unit)
            if slot is None:
                slot = pool.victim()
                if slot is None:
                    return
                self._upload(unit, slot)
            pool.expected.popleft()
            slot.claims += 1
            pool.assigned.append((unit, slot))

    def _vacate(self, slot: Slot) -> None:
        # TRAP: what nobody came for may still be on its way (tests/engine/test_feed.py)
        assert slot.arrival is not None
        self._backend.wait(Lane.COMPUTE, slot.arrival.result())
        slot.unit = None
        self._backend.release(slot.buffer)
        slot.released = self._backend.record(Lane.COMPUTE)

    def _upload(self, unit: Unit, slot: Slot) -> None:
        if slot.unit is not None:
            self._vacate(slot)
        slot.unit = unit
        source = self._store.plane(unit, WEIGHT).buffer
        target, released = slot.buffer[: source.numel()], slot.released
        arrival: Future[Fence] = Future()
        slot.arrival = arrival

        def queue(update: Future[Fence]) -> None:
            try:
                self._backend.wait(Lane.UPLOAD, update.result())
                if released is not None:
                    self._backend.wait(Lane.UPLOAD, released)
                with self._clock.span(Lane.UPLOAD, unit.name):
                    self._backend.copy(Lane.UPLOAD, target, source)
                self.uploaded_bytes += source.numel()
                arrival.set_result(self._backend.record(Lane.UPLOAD))
            except BaseException as error:
                arrival.set_exception(error)

        self._deferred.ready(unit).add_done_callback(queue)
