"""Where gradients land @host: in planes of their own until the deferred step, or in a few buffers from which each unit is updated
at once.

On arrival there are no gradient planes: 2 bytes a parameter less (DESIGN section 3; 12 bytes with AdamW in fp32). The price is
exactness of another kind: nothing is known of the gradients that are still to come, so there is no clipping, and a step that
turns out not to be finite has been taken already. The worker updates behind the backward, in the order of arrival, and the
backward waits where all buffers are still being read. Checked by ``tests/engine/test_arrivals.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

from torch import Tensor

from layerferry.backends.base import Backend, Fence, Lane
from layerferry.engine.clock import Clock
from layerferry.engine.deferred import DeferredSteps
from layerferry.engine.sizes import arrival_sizes, pieces_of
from layerferry.errors import ConfigError, LayerFerryError, PlanError
from layerferry.layout import GRAD, Plane, PlaneSpec
from layerferry.optim.base import StepHyper
from layerferry.plan import Plan
from layerferry.store.store import Store
from layerferry.units import Piece, Unit


class GradientHomes(Protocol):
    """Where the drain sends gradients of units @host."""

    def plane(self, unit: Unit) -> Plane:
        """Where the gradient of ``unit`` goes to, or has gone to; the download lane may write there."""

    def landed(self, piece: Piece, fence: Fence) -> None:
        """A whole unit or a part of one is in its plane once ``fence`` is passed, and nothing will be added to it."""


class StoredGradients:
    """Every unit has a plane, which is read when the whole step is known."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def plane(self, unit: Unit) -> Plane:
        return self._store.plane(unit, GRAD)

    def landed(self, piece: Piece, fence: Fence) -> None:
        """The deferred step will come for it."""


@dataclass(eq=False)
class _Buffer:
    memory: Tensor  # [bytes of the largest unit's gradient] uint8 @host
    read: Future[Fence] | None = None
    """Done once the update from it is."""


class ArrivalBuffers:
    """``GradientHomes`` without planes. ``begin`` before every step; all calls come from the thread that runs the sweeps."""

    def __init__(self, store: Store, deferred: DeferredSteps, backend: Backend, clock: Clock, plan: Plan) -> None:
        self._store, self._deferred, self._backend, self._clock = store, deferred, backend, clock
        self._spec: PlaneSpec = store.specs[GRAD]
        sizes = arrival_sizes(store.units, plan, store.specs)
        self._buffers = {kind: cycle(_buffers(backend, *size)) for kind, size in sizes.items()}
        self._pieces = {unit.index: len(pieces_of(unit, plan)) for unit in store.units}
        self._hyper: StepHyper | None = None
        self._arriving: dict[int, tuple[_Buffer, Plane]] = {}
        self._missing: dict[int, int] = {}

    def begin(self, hyper: StepHyper) -> None:
        """The numbers of the step whose gradients come next."""
        self._hyper = hyper
        self._store.expect(reversed(self._store.units))
        self._arriving.clear()
        self._missing.clear()

    def plane(self, unit: Unit) -> Plane:
        if unit.index not in self._arriving:
            buffer = next(self._buffers[unit.is_layer])
            if buffer.read is not None:
                with self._clock.waiting("optimizer"):
                    self._backend.wait(Lane.DOWNLOAD, buffer.read.result())
            self._arriving[unit.index] = (buffer, Plane(unit.layout, self._spec, buffer.memory))
        return self._arriving[unit.index][1]

    def landed(self, piece: Piece, fence: Fence) -> None:
        """The last part of a unit stands for all: a lane works in order."""
        missing = self._missing.get(piece.index, self._pieces[piece.index]) - 1
        self._missing[piece.index] = missing
        if not missing:
            assert self._hyper is not None, "no step has begun"
            buffer, plane = self._arriving.pop(piece.index)
            buffer.read = self._deferred.arrived(piece.unit, self._hyper, fence, plane)


def gradient_homes(
    store: Store, deferred: DeferredSteps, backend: Backend, clock: Clock, plan: Plan
) -> tuple[GradientHomes, ArrivalBuffers | None]:
    """What ``plan`` asks for; the second is the same object where a step must be begun."""
    if not plan.on_arrival:
        return StoredGradients(store), None
    buffers = ArrivalBuffers(store, deferred, backend, clock, plan)
    return buffers, buffers


def refuse_carried_arrivals(plan: Plan) -> None:
    """``PlanError`` where a gradient would have to wait @host for the step's next wave."""
    if plan.on_arrival and plan.num_waves > 1 and not plan.resident_gradients:
        raise PlanError(
            f"num_waves: {plan.num_waves} waves sum their gradients @host, where updates on arrival keep none: "
            "set num_waves to 1, resident_gradients, or update_on_arrival to false"
        )


def refuse_clipping(limit: float) -> None:
    """``ConfigError``: the norm of all gradients is known when the first of them are gone."""
    if limit:
        raise ConfigError(
            f"max_grad_norm: {limit:g} needs the norm of all gradients before the first update, which update_on_arrival does not "
            "wait for: set max_grad_norm to 0, or update_on_arrival to false"
        )


class SpoiltStep(LayerFerryError):
    """A step that is not finite has been taken: the weights in memory are of no use."""


class HalfTakenStep(LayerFerryError):
    """A step has broken off between its first update and its last: the weights in memory are of no use, and those before it were
    well."""


def half_taken(step: int, error: BaseException) -> HalfTakenStep:
    """What whoever goes on all the same is told."""
    reason = f"{type(error).__name__}: {error}".split("\n", 1)[0].rstrip(" .:")
    return HalfTakenStep(
        f"step {step} broke off when some of its updates had been made ({reason}): the weights in memory are of two steps, and "
        "nothing more can be done with them"
    )


def taken_already(step: int, loss: float, norm: float) -> SpoiltStep:
    """What there is to say of it."""
    return SpoiltStep(
        f"step {step} was not finite (loss {loss:g}, gradient norm {norm:g}) and could not be skipped: update_on_arrival had "
        "taken it already, and the weights in memory are spoilt. update_on_arrival: false skips such a step, a lower "
        "learning_rate may avoid it"
    )


def _buffers(backend: Backend, count: int, num_bytes: int) -> Sequence[_Buffer]:
    return [_Buffer(backend.host_buffer(num_bytes, travels=True)) for _ in range(count)]
