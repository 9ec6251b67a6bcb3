"""Feed: host weights to slots, ahead of their use.

The engine tells what comes next (``expect``); uploads run as far ahead as there are free slots. ``with feed(unit) as slot``
waits for that unit's upload; leaving returns the slot, and the next expected upload takes it. A slot keeps what it holds
until it is needed for something else, and the content whose next use is furthest away goes first (L. Belady, "A study of
replacement algorithms", 1966; the order of uses is known here): with three slots the turn from forward to backward needs no
upload, and with a slot for every unit weights are resident. What is fed is a unit or a part of one (``units.divide``); a part
waits for its whole unit's update.

Waiting for a pending update never blocks the caller: the upload hangs on the update's future and is queued by whoever
finishes it. Checked by ``tests/engine/test_feed.py`` and, for every order of events, by the chaos backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor

from layerferry.backends.base import Backend, Fence, Lane
from layerferry.engine.clock import Clock
from layerferry.engine.deferred import DeferredSteps
from layerferry.layout import WEIGHT
from layerferry.store.store import Store
from layerferry.units import Buffers, Piece, Unit


@dataclass(eq=False)
class Slot:
    """A device buffer that one piece's weights land in. Written by the feed only."""

    buffer: Tensor  # [slot_bytes] uint8 @device
    piece: Piece | None = None
    arrival: Future[Fence] | None = None
    released: Fence | None = None
    claims: int = 0
    """Expected uses that this content will still serve, the present one included."""
    last_use: int = -1


class SlotPool:
    """Slots of one size, and the pieces that use them."""

    def __init__(self, backend: Backend, *, num_slots: int, slot_bytes: int) -> None:
        self.slots = [Slot(backend.device_buffer(slot_bytes)) for _ in range(num_slots)]
        self.expected: deque[Piece] = deque()
        self.assigned: deque[tuple[Piece, Slot]] = deque()

    def holding(self, piece: Piece) -> Slot | None:
        return next((slot for slot in self.slots if slot.piece is piece), None)

    def victim(self) -> Slot | None:
        """The free slot whose content is needed last, of equals the one that was used longest ago."""
        free = [slot for slot in self.slots if not slot.claims]
        order = list(self.expected)

        def next_use(slot: Slot) -> int:
            return order.index(slot.piece) if slot.piece in order else len(order)

        return max(free, key=lambda slot: (next_use(slot), -slot.last_use), default=None)

    def outdated(self) -> list[Slot]:
        """Slots whose content is of no use once the weights have been stepped."""
        return [slot for slot in self.slots if slot.piece is not None]


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
        self, backend: Backend, clock: Clock, store: Store, deferred: DeferredSteps, pool_of: dict[Buffers, SlotPool]
    ) -> None:
        self._backend, self._clock, self._store, self._deferred, self.pool_of = backend, clock, store, deferred, pool_of
        self._uses = 0
        self.uploaded_bytes = 0

    def expect(self, pieces: Iterable[Piece]) -> None:
        """Say what will be fed next, in order; adds to what was said before."""
        touched = set()
        for piece in pieces:
            pool = self.pool_of[piece.buffers]
            pool.expected.append(piece)
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
    def __call__(self, piece: Piece) -> Iterator[Slot]:
        """The slot that holds ``piece``'s weights, for the compute lane, until the context is left."""
        with self.held(piece) as slot, self.timed(piece):
            yield slot

    def timed(self, piece: Piece) -> AbstractContextManager[None]:
        """What compute does inside is its work with ``piece``."""
        return self._clock.span(Lane.COMPUTE, piece.name)

    @contextmanager
    def held(self, piece: Piece) -> Iterator[Slot]:
        """The same for one of several that compute takes turns with: each use is ``timed`` by the caller."""
        pool = self.pool_of[piece.buffers]
        if not pool.assigned or pool.assigned[0][0] is not piece:
            self._unforeseen(pool, piece)
        _, slot = pool.assigned.popleft()
        assert slot.arrival is not None
        with self._clock.waiting("link" if slot.arrival.done() else "optimizer"):
            self._backend.wait(Lane.COMPUTE, slot.arrival.result())
        self._backend.touch(Lane.COMPUTE, reads=[slot.buffer])
        try:
            yield slot
        finally:
            slot.released = self._backend.record(Lane.COMPUTE)
            slot.claims -= 1
            slot.last_use = self._uses
            self._uses += 1
            self._advance(pool)

    def _unforeseen(self, pool: SlotPool, piece: Piece) -> None:
        for _, slot in pool.assigned:
            slot.claims -= 1
        pool.assigned.clear()
        pool.expected.clear()
        pool.expected.append(piece)
        self._advance(pool)

    def _advance(self, pool: SlotPool) -> None:
        while pool.expected:
            piece = pool.expected[0]
            slot = pool.holding(piece)
            if slot is None:
                slot = pool.victim()
                if slot is None:
                    return
                self._upload(piece, slot)
            pool.expected.popleft()
            slot.claims += 1
            pool.assigned.append((piece, slot))

    def _vacate(self, slot: Slot) -> None:
        # TRAP: what nobody came for may still be on its way (tests/engine/test_feed.py)
        assert slot.arrival is not None
        self._backend.wait(Lane.COMPUTE, slot.arrival.result())
        slot.piece = None
        self._backend.release(slot.buffer)
        slot.released = self._backend.record(Lane.COMPUTE)

    def _upload(self, piece: Piece, slot: Slot) -> None:
        if slot.piece is not None:
            self._vacate(slot)
        slot.piece = piece
        source = self._store.plane(piece.unit, WEIGHT)
        stretches, target, released = piece.stretches(source.spec), slot.buffer, slot.released
        arrival: Future[Fence] = Future()
        slot.arrival = arrival

        def queue(update: Future[Fence]) -> None:
            try:
                self._backend.wait(Lane.UPLOAD, update.result())
                if released is not None:
                    self._backend.wait(Lane.UPLOAD, released)
                with self._clock.span(Lane.UPLOAD, piece.name):
                    for at_home, in_piece in stretches:
                        self._backend.copy(Lane.UPLOAD, target[in_piece], source.buffer[at_home])
                self.uploaded_bytes += sum(at_home.stop - at_home.start for at_home, _ in stretches)
                arrival.set_result(self._backend.record(Lane.UPLOAD))
            except BaseException as error:
                arrival.set_exception(error)

        self._deferred.ready(piece.unit).add_done_callback(queue)
