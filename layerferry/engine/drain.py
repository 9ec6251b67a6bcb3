"""Drain: gradients from the device to their host planes, behind the backward.

``with drain(unit) as accumulator`` gives a zeroed fp32 plane on the device; micro-batches add into it. On leaving it is
rounded once into a slab of the gradient plane's dtypes, the norm of exactly those bytes is taken (no extra pass over host
memory), and the slab travels down while the next unit computes. In the second and later waves of a step the accumulator
starts from the gradient already @host, which is brought back one unit ahead of its use (``expect``). A unit that is drained in
parts (``units.divide``) has the norm of all their bytes. A frozen one has an accumulator of no bytes, and nothing of it travels.

TRAP: a parameter that got no gradient still owns its span and sends zeros (tests/engine/test_drain.py).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from layerferry.backends.base import Backend, Fence, Lane
from layerferry.engine.arrivals import GradientHomes
from layerferry.engine.clock import Clock
from layerferry.engine.sizes import ROUNDED_AT_ONCE
from layerferry.layout import FP32_PLANE, GRAD, SECTION_DTYPES, Plane
from layerferry.store.store import Store
from layerferry.units import Buffers, Piece, Unit

NORMED_AT_ONCE = 1 << 20
"""Elements."""


@dataclass(eq=False)
class Slab:
    """A device buffer that gradients leave from. Written by the drain only."""

    buffer: Tensor  # [slab_bytes] uint8 @device
    free: Fence | None = None


class SlabPool:
    """An accumulator, and a ring of slabs, for units of one kind."""

    keeps = False
    """Whether an accumulator holds its sum from wave to wave."""

    def __init__(
        self,
        backend: Backend,
        own: Iterable[Piece] = (),
        *,
        num_slabs: int,
        num_landings: int,
        slab_bytes: int,
        accumulator_bytes: int,
    ) -> None:
        """``own``: pieces that are summed at the same time as others, each in an accumulator of its own."""
        self._accumulator = backend.device_buffer(accumulator_bytes)
        self._own = {(p.index, p.number): backend.device_buffer(p.layout.bytes(FP32_PLANE)) for p in own}
        self._leaving = itertools.cycle([Slab(backend.device_buffer(slab_bytes)) for _ in range(num_slabs)])
        self._landing = itertools.cycle([Slab(backend.device_buffer(slab_bytes)) for _ in range(num_landings)])

    def accumulator(self, piece: Piece) -> Tensor:
        """[>= accumulator_bytes] uint8 @device: where the gradient of ``piece`` is summed in fp32."""
        return self._own.get((piece.index, piece.number), self._accumulator)

    def leaving(self) -> Slab:
        """The slab that the next gradient leaves from."""
        return next(self._leaving)

    def landing(self) -> Slab:
        """The slab that the next carried gradient lands in."""
        return next(self._landing)


class ResidentAccumulators(SlabPool):
    """An accumulator for every piece: several waves are summed in fp32 @device and travel once."""

    keeps = True

    def __init__(self, backend: Backend, pieces: Iterable[Piece], *, num_slabs: int, slab_bytes: int) -> None:
        super().__init__(backend, pieces, num_slabs=num_slabs, num_landings=0, slab_bytes=slab_bytes, accumulator_bytes=0)


class HomeAccumulators(SlabPool):
    """Units that live @device: their gradient plane, of four bytes, is the accumulator, and nothing travels."""

    keeps = True

    def __init__(self, backend: Backend, store: Store) -> None:
        super().__init__(backend, num_slabs=0, num_landings=0, slab_bytes=0, accumulator_bytes=0)
        self._store = store

    def accumulator(self, piece: Piece) -> Tensor:
        return self._store.plane(piece.unit, GRAD).buffer


class Drain:
    """Owns accumulators and slabs. ``drained`` and ``norms`` speak of the step's last wave."""

    def __init__(
        self, backend: Backend, clock: Clock, store: Store, pool_of: Mapping[Buffers, SlabPool], homes: GradientHomes
    ) -> None:
        self._backend, self._clock, self._store, self._pool_of, self._homes = backend, clock, store, pool_of, homes
        self.last_wave = True
        """Set by the engine before a wave: sums that stay @device leave it with the last one."""
        self.drained: dict[int, Fence] = {}
        """Index of a trained unit -> passed once its gradient is in its plane."""
        self.norms: dict[int, Tensor] = {}
        """Index of a trained unit -> 2-norm [] fp32 @device of the gradient as the optimizer will read it."""
        self.drained_bytes = 0
        self._nothing = backend.device_buffer(0)
        self._norms_of_parts: dict[int, dict[int, Tensor]] = {}
        self._expected: deque[Piece] = deque()
        self._landed: dict[tuple[int, int], tuple[Slab, Fence]] = {}

    def expect(self, pieces: Iterable[Piece]) -> None:
        """These gradients will be carried on, in this order: the first is on its way when this returns."""
        self._expected = deque(piece for piece in pieces if piece.num_trained and not self._pool_of[piece.buffers].keeps)
        self._landed.clear()
        self._bring_next()

    @contextmanager
    def __call__(self, piece: Piece, *, carry: bool = False) -> Iterator[Plane]:
        """The fp32 accumulator of ``piece`` @device: zero, or with ``carry`` the sum of the step's earlier waves."""
        if not piece.num_trained:
            yield Plane(piece.layout, FP32_PLANE, self._nothing)
            return
        pool = self._pool_of[piece.buffers]
        buffer = pool.accumulator(piece)
        accumulator = Plane(piece.layout, FP32_PLANE, buffer)
        self._backend.touch(Lane.COMPUTE, writes=[buffer])
        if not carry:
            self._forget_landed()
            accumulator.buffer.zero_()
        elif not pool.keeps:
            self._take_up(piece, accumulator)
        yield accumulator
        if piece.index in self._store.on_device:
            self._settle_at_home(piece.unit, accumulator)
        elif self.last_wave or not pool.keeps:
            self._send(piece, pool, accumulator)

    def _settle_at_home(self, unit: Unit, accumulator: Plane) -> None:
        if self.last_wave:
            for section, dtype in zip(SECTION_DTYPES, self._store.specs[GRAD].dtypes, strict=True):
                values = accumulator.sections.get(section)
                if values is not None and dtype not in (None, torch.float32):
                    # as on the way to the host: the same bits wherever a unit lives
                    for some in torch.split(values, ROUNDED_AT_ONCE):
                        some.copy_(some.to(dtype))
            self.norms[unit.index] = _norm(accumulator)
        self.drained[unit.index] = self._backend.record(Lane.COMPUTE)

    def _bring_next(self) -> None:
        if not self._expected:
            return
        piece = self._expected.popleft()
        slab, grad = self._pool_of[piece.buffers].landing(), self._homes.plane(piece.unit)
        if slab.free is not None:
            self._backend.wait(Lane.UPLOAD, slab.free)
        self._backend.wait(Lane.UPLOAD, self.drained[piece.index])
        with self._clock.span(Lane.UPLOAD, f"{piece.name} gradient"):
            for at_home, in_piece in piece.stretches(grad.spec):
                self._backend.copy(Lane.UPLOAD, slab.buffer[in_piece], grad.buffer[at_home])
        self._landed[piece.index, piece.number] = (slab, self._backend.record(Lane.UPLOAD))

    def _forget_landed(self) -> None:
        """What a wave that broke off did not take up is still read @host, and this step writes there."""
        for _, arrival in self._landed.values():
            self._backend.wait(Lane.COMPUTE, arrival)
        self._landed.clear()

    def _take_up(self, piece: Piece, accumulator: Plane) -> None:
        slab, arrival = self._landed.pop((piece.index, piece.number))
        with self._clock.waiting("link"):
            self._backend.wait(Lane.COMPUTE, arrival)
        self._backend.touch(Lane.COMPUTE, reads=[slab.buffer])
        landed = Plane(piece.layout, self._homes.plane(piece.unit).spec, slab.buffer)
        for section, values in landed.sections.items():
            accumulator.sections[section].copy_(values)
        slab.free = self._backend.record(Lane.COMPUTE)
        self._bring_next()

    def _send(self, piece: Piece, pool: SlabPool, accumulator: Plane) -> None:
        slab, grad = pool.leaving(), self._homes.plane(piece.unit)
        if slab.free is not None:
            with self._clock.waiting("link"):
                self._backend.wait(Lane.COMPUTE, slab.free)
        self._backend.touch(Lane.COMPUTE, writes=[slab.buffer])
        leaving = Plane(piece.layout, grad.spec, slab.buffer)
        for section, values in leaving.sections.items():
            values.copy_(accumulator.sections[section])
        self._note_norm(piece, _norm(leaving))
        self._backend.wait(Lane.DOWNLOAD, self._backend.record(Lane.COMPUTE))
        with self._clock.span(Lane.DOWNLOAD, piece.name):
            for at_home, in_piece in piece.stretches(grad.spec):
                self._backend.copy(Lane.DOWNLOAD, grad.buffer[at_home], leaving.buffer[in_piece])
        # of a unit in parts the last one to leave stands for all: a lane works in order
        self.drained[piece.index] = slab.free = self._backend.record(Lane.DOWNLOAD)
        self.drained_bytes += leaving.buffer.numel()
        if self.last_wave:
            self._homes.landed(piece, slab.free)

    def _note_norm(self, piece: Piece, norm: Tensor) -> None:
        shares = self._norms_of_parts.setdefault(piece.index, {})
        shares[piece.number] = norm
        self.norms[piece.index] = _together(list(shares.values()))


def _norm(plane: Plane) -> Tensor:
    return _together([_norm_of(section) for section in plane.tensors()])


def _norm_of(values: Tensor) -> Tensor:
    """[n] -> []. On a CPU by slices: torch makes an fp32 copy there of what is narrower."""
    slices = torch.split(values, NORMED_AT_ONCE) if values.device.type == "cpu" else (values,)
    return _together([torch.linalg.vector_norm(some, dtype=torch.float32) for some in slices])


def _together(norms: list[Tensor]) -> Tensor:
    whole: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return whole
