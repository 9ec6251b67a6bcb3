"""Planes x units, @host, @device or @disk: the authoritative home of every persistent byte.

A parameter's fp32 master lives as a bf16 high half in the weight plane (the very bytes that are uploaded) and a signed
16-bit remainder in the residue plane (8 bits, or no residue at all, in the formats that ask for it); fp32-only parameters
keep four bytes in the weight plane's second section, and frozen ones have their weight alone. There is no second copy of
anything: initialisation peaks at steady state plus the one parameter that is being written. Of units @disk, what does not travel
to the device (residue and moments) is in the disk tier (``disk.py``), and @host only inside ``at_hand``; outside of it those
planes have sizes and no bytes. Checked by ``tests/store/test_store.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from layerferry.backends.base import Backend, Lane
from layerferry.layout import FP32_PLANE, GRAD, GRAD_PLANE, RESIDUE, RESIDUE_PLANE, WEIGHT, WEIGHT_PLANE, Entry, Plane, PlaneSpec
from layerferry.master import join_master, split_master, split_master24
from layerferry.store.away import away
from layerferry.store.disk import DiskTier
from layerferry.store.scratch import ScratchFile
from layerferry.units import Unit

TRAVELLING = (WEIGHT, GRAD)
"""Planes that cross the link, and are pinned."""
PIECE = 1 << 26
"""Elements of a parameter that are split into weight and residue at once: experts of two billion would need 8 GiB four times."""


def plane_specs(state_planes: Mapping[str, PlaneSpec], *, grad: PlaneSpec = GRAD_PLANE) -> dict[str, PlaneSpec]:
    """Every plane of a unit under an optimizer that asks for ``state_planes``; the store and the planner both count with it.

    A residue among ``state_planes`` takes the place of the 16 bits that make the master fp32.
    """
    return {WEIGHT: WEIGHT_PLANE, RESIDUE: RESIDUE_PLANE, GRAD: grad, **state_planes}


def state_specs(specs: Mapping[str, PlaneSpec]) -> dict[str, PlaneSpec]:
    """Those of the planes that never leave for the device: what of a unit may live @disk."""
    return {kind: spec for kind, spec in specs.items() if kind not in TRAVELLING}


def state_bytes(unit: Unit, specs: Mapping[str, PlaneSpec]) -> int:
    """Bytes of those planes of ``unit``, stacked; 0 where it has none."""
    stacked = unit.layout.stack(state_specs(specs)).values()
    return max((place.stop for place in stacked if place.stop > place.start), default=0)


class Store:
    """Owns the host planes. Written by the loader before training, by the drain (grad) and by the optimizer's thread (the
    rest)."""

    def __init__(
        self,
        units: Sequence[Unit],
        specs: Mapping[str, PlaneSpec],
        backend: Backend,
        *,
        on_device: Iterable[int] = (),
        on_disk: Iterable[int] = (),
        scratch: ScratchFile | None = None,
        keeps_gradients: bool = True,
    ) -> None:
        """``on_device``: indexes of the units whose planes live @device. The others have a gradient plane only where
        ``keeps_gradients``. ``on_disk``: of those whose state lives in ``scratch``, which must be given where there are any; a
        unit without state has nothing to put there."""
        self.units = tuple(units)
        self.specs = dict(specs)
        self.on_device = frozenset(on_device)
        self._keeps_gradients = keeps_gradients
        wanted = {unit.index: state_bytes(unit, specs) for unit in self.units if unit.index in frozenset(on_disk)}
        self.on_disk = frozenset(index for index, num_bytes in wanted.items() if num_bytes)
        assert not self.on_disk & self.on_device, "a unit has one home"
        self.disk: DiskTier | None = None
        """Where the state of the units ``on_disk`` is; None where there are none."""
        if self.on_disk:
            assert scratch is not None, "units @disk need a scratch file"
            names = {unit.index: unit.name for unit in self.units}
            self.disk = DiskTier(names, {index: wanted[index] for index in sorted(self.on_disk)}, backend, scratch)
        self._planes: list[Mapping[str, Plane]] = [
            {kind: self._plane(backend, unit, kind, spec) for kind, spec in self.specs_of(unit).items()} for unit in self.units
        ]

    def specs_of(self, unit: Unit) -> dict[str, PlaneSpec]:
        """A unit that lives @device sums its gradient where it is read, in fp32."""
        if unit.index in self.on_device:
            return {**self.specs, GRAD: FP32_PLANE}
        return {kind: spec for kind, spec in self.specs.items() if kind != GRAD or self._keeps_gradients}

    def _plane(self, backend: Backend, unit: Unit, kind: str, spec: PlaneSpec) -> Plane:
        num_bytes = unit.layout.bytes(spec)
        if unit.index in self.on_disk and kind not in TRAVELLING:
            return Plane(unit.layout, spec, away(num_bytes, f"{kind} of {unit.name}"))
        if unit.index in self.on_device:
            home = backend.device_buffer(num_bytes)
            backend.touch(Lane.COMPUTE, writes=[home])  # it is filled by whoever has a value for it
            return Plane(unit.layout, spec, home)
        return Plane(unit.layout, spec, backend.host_buffer(num_bytes, travels=kind in TRAVELLING))

    def plane(self, unit: Unit, kind: str) -> Plane:
        return self._planes[unit.index][kind]

    def planes(self, unit: Unit) -> Mapping[str, Plane]:
        return self._planes[unit.index]

    @contextmanager
    def at_hand(self, unit: Unit, *, writes: bool = True) -> Iterator[Mapping[str, Plane]]:
        """All planes of ``unit``, where they can be read while the caller is inside, and with ``writes`` be written: state @disk
        is fetched before and spilled behind. A unit belongs to one thread at a time, and few are held (``DiskTier.at_hand``)."""
        if self.disk is None or unit.index not in self.on_disk:
            yield self._planes[unit.index]
            return
        away = self._planes[unit.index]
        with self.disk.at_hand(unit.index, writes=writes) as memory:
            places = unit.layout.stack(state_specs(self.specs))
            fetched = {kind: Plane(unit.layout, self.specs[kind], memory[place]) for kind, place in places.items()}
            self._planes[unit.index] = {kind: fetched.get(kind, plane) for kind, plane in away.items()}
            try:
                yield self._planes[unit.index]
            finally:
                self._planes[unit.index] = away

    def expect(self, units: Iterable[Unit]) -> None:
        """``at_hand`` will be asked for these in this order, step after step: what is @disk is read ahead."""
        if self.disk is not None:
            self.disk.expect(unit.index for unit in units)

    def close(self) -> None:
        """What is @disk is gone; the other planes stay as long as somebody holds them."""
        if self.disk is not None:
            self.disk.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all planes, wherever they live."""
        return sum(plane.buffer.numel() for planes in self._planes for plane in planes.values())

    @property
    def num_params(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def num_trained(self) -> int:
        return sum(unit.num_trained for unit in self.units)

    def set_parameter(self, unit: Unit, entry: Entry, value: Tensor) -> None:
        """Write one parameter; ``value`` of any float dtype and of ``entry.shape`` becomes the fp32 master."""
        assert tuple(value.shape) == entry.shape, f"{entry.name}: {tuple(value.shape)} is not {entry.shape}"
        weight, residue = self.plane(unit, WEIGHT).view(entry), self._residue(unit, entry)
        if residue is None:
            _put(weight, value)
        elif value.dtype == torch.bfloat16:
            _put(weight, value)
            residue.zero_()
        else:
            split = split_master24 if residue.dtype == torch.int8 else split_master
            flat = (value.reshape(-1), weight.view(-1), residue.view(-1))
            for given, upper, lower in zip(*(torch.split(one, PIECE) for one in flat), strict=True):
                high, low = split(given.float())
                _put(upper, high)
                _put(lower, low)

    def master(self, unit: Unit, entry: Entry) -> Tensor:
        """The master of one parameter as fp32, a copy in ``entry.shape`` where the unit lives."""
        weight, residue = self.plane(unit, WEIGHT).view(entry), self._residue(unit, entry)
        return weight.to(torch.float32, copy=True) if residue is None else join_master(weight, residue)

    def _residue(self, unit: Unit, entry: Entry) -> Tensor | None:
        """None where the weight plane holds the whole master."""
        plane = self.plane(unit, RESIDUE)
        return plane.view(entry) if plane.holds(entry) else None

    def parameter(self, unit: Unit, entry: Entry) -> Tensor:
        """The parameter as the device computes with it (bf16, or fp32 where it must be), a view @host."""
        return self.plane(unit, WEIGHT).view(entry)


def _put(target: Tensor, value: Tensor) -> None:
    """Write ``value``, wherever it is. TRAP: straight from a device into a plane that is registered in pieces, a copy over a
    border of two pieces is refused (``backends/pinning.py``); through memory of its own it is not."""
    for part, given in zip(torch.split(target.view(-1), PIECE), torch.split(value.reshape(-1), PIECE), strict=True):
        part.copy_(given.to(part.device))
