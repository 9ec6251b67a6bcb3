"""How one unit's update is made: at once, or in stages of which the middle one is the device's.

``DeferredSteps`` says when: it begins a unit, and finishes it after the next one has begun, so that the worker computes while the
device does. ``Whole`` is done when it has begun. ``Staged`` (Muon) prepares the unit where it lives, sends its matrices through
the side lane (up into a landing, orthogonalised there, back to where they came from: the gradient plane), and finishes it. Units
that live @device go the same way without travelling. The side lane works in order, and whoever fills it holds a lock for a
unit, so one landing and one workspace serve all. Checked by ``tests/engine/test_staged.py`` and, for every order of events, by
the chaos backend.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Protocol, TypeAlias

import torch

from layerferry.backends.base import Backend, Fence, Lane
from layerferry.engine.clock import Clock
from layerferry.engine.sizes import orthogonal_bytes
from layerferry.layout import GRAD, Plane
from layerferry.optim.base import Optimizer, StagedOptimizer, StepHyper
from layerferry.optim.orthogonal import Stack, stacks_of
from layerferry.store.store import Store
from layerferry.units import Unit

Planes: TypeAlias = Mapping[str, Plane]
"""Of one unit, the gradient among them, all at one place."""


class Stages(Protocol):
    """Both halves of an update on ``lane``: HOST for planes @host, COMPUTE for planes @device."""

    moved_bytes: int
    """That have travelled for updates since the start, both ways together."""

    def finishes(self, unit: Unit) -> bool:
        """Whether the update has a second half; else ``begin`` is all of it."""

    def begin(self, lane: Lane, unit: Unit, planes: Planes, hyper: StepHyper) -> Fence:
        """The first half; the fence is passed when the second may begin."""

    def finish(self, lane: Lane, unit: Unit, planes: Planes, hyper: StepHyper) -> Fence:
        """The second half; the fence is passed when the update is complete."""


def stages_of(store: Store, optimizer: Optimizer, backend: Backend, clock: Clock, *, threads: int) -> Stages:
    """As the optimizer is made."""
    if isinstance(optimizer, StagedOptimizer):
        return Staged(store, optimizer, backend, clock, threads=threads)
    return Whole(optimizer, backend, threads=threads)


class Whole:
    """``Optimizer.step``, and nothing left to do."""

    def __init__(self, optimizer: Optimizer, backend: Backend, *, threads: int) -> None:
        self._optimizer, self._backend, self._threads = optimizer, backend, threads
        self.moved_bytes = 0

    def finishes(self, unit: Unit) -> bool:
        return False

    def begin(self, lane: Lane, unit: Unit, planes: Planes, hyper: StepHyper) -> Fence:
        self._backend.touch(lane, writes=[plane.buffer for plane in planes.values()])
        self._optimizer.step(planes, unit.layout, hyper, self._threads)
        return self._backend.record(lane)

    def finish(self, lane: Lane, unit: Unit, planes: Planes, hyper: StepHyper) -> Fence:
        raise AssertionError("an update at once has no second half")


class Staged:
    """The stages of a ``StagedOptimizer``. Owns a landing and a workspace @device. Units without matrices are stepped at once."""

    def __init__(self, store: Store, optimizer: StagedOptimizer, backend: Backend, clock: Clock, *, threads: int) -> None:
        self._optimizer, self._backend, self._clock, self._threads = optimizer, backend, clock, threads
        self._at_once = Whole(optimizer, backend, threads=threads)
        self._lock = threading.Lock()
        landing, working = orthogonal_bytes(store.units, store.specs, store.on_device)
        self._landing, self._workspace = backend.device_buffer(landing), backend.device_buffer(working)
        self.moved_bytes = 0

    def finishes(self, unit: Unit) -> bool:
        return bool(stacks_of(unit.layout))

    def begin(self, lane: Lane, unit: Unit, planes: Planes, hyper: StepHyper) -> Fence:
        if not self.finishes(unit):
            return self._at_once.begin(lane, unit, planes, hyper)
        self._backend.touch(lane, writes=[plane.buffer for plane in planes.values()])
        self._optimizer.prepare(planes, unit.layout, hyper, self._threads)
        with self._lock:
            self._backend.wait(Lane.SIDE, self._backend.record(lane))
            with self._clock.span(Lane.SIDE, unit.name):
                for stack in stacks_of(unit.layout):
                    self._orthogonalise(stack, planes[GRAD], travels=lane is Lane.HOST)
            return self._backend.record(Lane.SIDE)

    def _orthogonalise(self, stack: Stack, plane: Plane, *, travels: bool) -> None:
        backend = self._backend
        home = plane.view(stack.entry).view(-1)[stack.start : stack.start + stack.numel]
        at_home = home.view(torch.uint8)
        there = self._landing[: at_home.numel()] if travels else at_home
        if travels:
            backend.copy(Lane.SIDE, there, at_home)
        backend.touch(Lane.SIDE, writes=[there, self._workspace])
        backend.run(Lane.SIDE, partial(self._optimizer.orthogonalise, stack, there.view(home.dtype), self._workspace))
        if travels:
            backend.copy(Lane.SIDE, at_home, there)
            self.moved_bytes += 2 * at_home.numel()

    def finish(self, lane: Lane, unit: Unit, planes: Planes, hyper: StepHyper) -> Fence:
        self._backend.touch(lane, writes=[plane.buffer for plane in planes.values()])
        self._optimizer.finish(planes, unit.layout, hyper, self._threads)
        return self._backend.record(lane)
