"""The deferred exact step: updates run on a worker thread, in the order in which the next forward needs the units.

After the backward the clip coefficient is known exactly; each unit's update is then queued with the learning rate, step
number and coefficient of *its* step, and the feed of a unit waits for that unit's update alone. Nothing is stale and
nothing is rolled back: the result has the same bits as stepping every unit at once. An update in stages (``stages.py``) is
finished when the next one has begun: the worker has something to do while the device works. ``settle`` finishes what is pending;
``hold`` lets a reader see one unit as a step has left it, at the price that the unit's next update waits for the reader, and
with it those behind it in the worker's order; none before it does. A failure in the worker reaches whoever next needs the unit.
Checked by ``tests/engine/test_deferred.py`` against the serial order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from layerferry.backends.base import Backend, Fence, Lane
from layerferry.engine.clock import Clock
from layerferry.engine.stages import Planes, Stages
from layerferry.layout import GRAD, Plane
from layerferry.optim.base import StepHyper
from layerferry.store.store import Store
from layerferry.units import Unit


@dataclass(frozen=True, slots=True)
class Hold:
    """One unit as the latest step leaves it: complete once ``settled``, unchanged until its holder resolves ``released``."""

    settled: Future[Fence]
    released: Future[Fence]
    """TRAP: the holder must resolve it whatever happens, or the next update waits for ever (tests/checkpoint/test_save.py)."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Update:
    """One unit's update. ``planes`` are at hand from the beginning of its first half to the end of its last; the worker's."""

    unit: Unit
    hyper: StepHyper
    drained: Fence
    held: Future[Fence] | None
    grad: Plane | None = None
    """None: the store has a plane."""
    planes: Planes = field(default_factory=dict)
    at_hand: ExitStack = field(default_factory=ExitStack)
    first: Future[Fence] = field(default_factory=Future)


class DeferredSteps:
    """Owns the worker. Between ``defer`` and completion the worker alone writes a unit's planes."""

    def __init__(self, store: Store, stages: Stages, backend: Backend, clock: Clock) -> None:
        self._store, self._backend, self._clock = store, backend, clock
        self.stages = stages
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer")
        self._ready: dict[int, Future[Fence]] = {}
        self._held: dict[int, Future[Fence]] = {}
        self.busy_s = 0.0
        """Seconds the worker has spent in updates since the start."""
        self._waited_s, self._waiting = 0.0, set[float]()
        self._counting = threading.Lock()
        self.num_begun = 0
        """Updates that were ordered since the start, or made at once."""
        self.num_done = 0
        """Updates that the worker has finished since the start."""

    def defer(self, units: Iterable[Unit], hyper: StepHyper, drained: Mapping[int, Fence]) -> None:
        """Update ``units`` in this order; ``drained[unit.index]`` is passed once its gradient is in its plane.

        Units that live @device are updated on the compute lane now, the others by the worker.
        """
        units = tuple(units)
        self._store.expect(units)
        begun: _Update | None = None
        for unit in units:
            self.num_begun += 1
            own = replace(hyper, stream=unit.stream)
            held = self._held.pop(unit.index, None)
            if unit.index in self._store.on_device:
                self._at_home(unit, own, held)
                continue
            if held is not None and not held.done():  # the update before must not wait with it (tests/engine/test_disk.py)
                self._finish_later(begun)
                begun = None
            update = _Update(unit=unit, hyper=own, drained=drained[unit.index], held=held)
            update.first = self._worker.submit(self._begin, update)
            self._finish_later(begun)
            begun = update if self.stages.finishes(unit) else None
            if begun is None:
                self._ready[unit.index] = update.first
        self._finish_later(begun)

    def arrived(self, unit: Unit, hyper: StepHyper, drained: Fence, grad: Plane) -> Future[Fence]:
        """Update one unit @host from ``grad``, which is no plane of the store and may be used again when the future is done."""
        self.num_begun += 1
        own, held = replace(hyper, stream=unit.stream), self._held.pop(unit.index, None)
        update = _Update(unit=unit, hyper=own, drained=drained, held=held, grad=grad)
        update.first = self._ready[unit.index] = self._worker.submit(self._begin, update)
        if self.stages.finishes(unit):
            self._finish_later(update)
        return self._ready[unit.index]

    def _finish_later(self, begun: _Update | None) -> None:
        if begun is not None:
            self._ready[begun.unit.index] = self._worker.submit(self._finish, begun)

    def _at_home(self, unit: Unit, hyper: StepHyper, held: Future[Fence] | None) -> None:
        self._pass(Lane.COMPUTE, held)
        planes = self._store.planes(unit)
        with self._clock.span(Lane.COMPUTE, f"step {unit.name}"):
            first = self.stages.begin(Lane.COMPUTE, unit, planes, hyper)
            if self.stages.finishes(unit):
                self._backend.wait(Lane.COMPUTE, first)
                self.stages.finish(Lane.COMPUTE, unit, planes, hyper)

    def _begin(self, update: _Update) -> Fence:
        update.drained.synchronize()
        self._pass(Lane.HOST, update.held)
        unit, finishes = update.unit, self.stages.finishes(update.unit)
        with ExitStack() as at_hand:
            planes = at_hand.enter_context(self._store.at_hand(unit))
            update.planes = planes if update.grad is None else {**planes, GRAD: update.grad}
            with self._working(unit, completes=not finishes):
                fence = self.stages.begin(Lane.HOST, unit, update.planes, update.hyper)
            if finishes:
                update.at_hand = at_hand.pop_all()
            return fence

    def _finish(self, begun: _Update) -> Fence:
        with begun.at_hand:
            begun.first.result().synchronize()
            with self._working(begun.unit, completes=True):
                return self.stages.finish(Lane.HOST, begun.unit, begun.planes, begun.hyper)

    @contextmanager
    def _working(self, unit: Unit, *, completes: bool) -> Iterator[None]:
        begin = time.perf_counter()
        with self._clock.span(Lane.HOST, unit.name):
            yield
        self.busy_s += time.perf_counter() - begin
        self.num_done += completes

    def hold(self, unit: Unit) -> Hold:
        """From here on the unit's next update waits until ``released`` is resolved; the fence orders ``unit``'s reader behind
        the update before. At most one hold a unit is open."""
        assert unit.index not in self._held or self._held[unit.index].done(), f"{unit.name} is held already"
        settled = self.ready(unit)
        if unit.index in self._store.on_device:
            settled = Future()
            settled.set_result(self._backend.record(Lane.COMPUTE))
        released: Future[Fence] = Future()
        self._held[unit.index] = released
        return Hold(settled, released)

    def _pass(self, lane: Lane, held: Future[Fence] | None) -> None:
        if held is None:
            return
        begin = time.perf_counter()
        with self._counting:
            self._waiting.add(begin)
        try:
            self._backend.wait(lane, held.result())
        finally:
            with self._counting:
                self._waiting.discard(begin)
                self._waited_s += time.perf_counter() - begin

    @property
    def held_s(self) -> float:
        """Seconds that updates have waited for holders since the start, those that wait now included: who lets go knows at once
        what that has cost, however late the worker wakes."""
        with self._counting:
            now = time.perf_counter()
            return self._waited_s + sum(now - begin for begin in self._waiting)

    @property
    def num_pending(self) -> int:
        """Updates that the worker has not finished."""
        return sum(not update.done() for update in list(self._ready.values()))

    def ready(self, unit: Unit) -> Future[Fence]:
        """Done once the unit's weights @host are those of the latest step; its fence orders later lanes behind the update."""
        known = self._ready.get(unit.index)
        if known is None:
            known = Future()
            known.set_result(self._backend.record(Lane.HOST))
        return known

    def settle(self) -> None:
        """Block until no update is pending, and order the calling thread behind them. Raises what the worker raised."""
        for pending in self._ready.values():
            self._backend.wait(Lane.HOST, pending.result())
        self._ready.clear()

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
