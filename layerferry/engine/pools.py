"""Which pool of slots and slabs each unit uses: its own planes where it lives @device, else shared buffers of its kind."""

from __future__ import annotations

from collections.abc import Mapping

from layerferry.backends.base import Backend
from layerferry.engine.drain import HomeSlabs, SlabPool
from layerferry.engine.feed import HomePool, SlotPool
from layerferry.engine.sizes import DeviceSizes
from layerferry.store.store import Store


def slot_pools(store: Store, sizes: Mapping[bool, DeviceSizes], backend: Backend) -> dict[int, SlotPool]:
    """By unit index. The ends share one slot: they are used far apart."""
    shared = {kind: SlotPool(backend, num_slots=size.num_slots, slot_bytes=size.slot_bytes) for kind, size in sizes.items()}
    home = HomePool(backend, store, [unit for unit in store.units if unit.index in store.on_device])
    return {unit.index: home if unit.index in store.on_device else shared[unit.is_layer] for unit in store.units}


def slab_pools(store: Store, sizes: Mapping[bool, DeviceSizes], backend: Backend) -> dict[int, SlabPool]:
    """By unit index. Units of one kind share an accumulator, wherever they live."""
    pools: dict[int, SlabPool] = {}
    for kind, size in sizes.items():
        shared = SlabPool(backend, num_slabs=size.num_slabs, slab_bytes=size.slab_bytes, accumulator_bytes=size.accumulator_bytes)
        units = [unit for unit in store.units if unit.is_layer is kind]
        home = HomeSlabs(shared.accumulator, store, [unit for unit in units if unit.index in store.on_device])
        for unit in units:
            pools[unit.index] = home if unit.index in store.on_device else shared
    return pools
