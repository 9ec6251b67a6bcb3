"""Which pool of slots and accumulators each unit uses: its own planes where it lives @device, else buffers of its kind."""

from __future__ import annotations

from collections.abc import Mapping

from layerferry.backends.base import Backend
from layerferry.engine.drain import HomeAccumulators, ResidentAccumulators, SlabPool
from layerferry.engine.feed import HomePool, SlotPool
from layerferry.engine.sizes import DeviceSizes, pieces_of, turning_sums
from layerferry.plan import Plan
from layerferry.store.store import Store


def slot_pools(store: Store, sizes: Mapping[bool, DeviceSizes], backend: Backend) -> dict[int, SlotPool]:
    """By unit index. The ends share one slot: they are used far apart."""
    shared = {kind: SlotPool(backend, num_slots=size.num_slots, slot_bytes=size.slot_bytes) for kind, size in sizes.items()}
    home = HomePool(backend, store, [unit for unit in store.units if unit.index in store.on_device])
    return {unit.index: home if unit.index in store.on_device else shared[unit.is_layer] for unit in store.units}


def slab_pools(store: Store, sizes: Mapping[bool, DeviceSizes], backend: Backend, plan: Plan) -> dict[int, SlabPool]:
    """By index of the units that are trained."""
    trained = [unit for unit in store.units if unit.num_trained]
    pools: dict[int, SlabPool] = {}
    home = HomeAccumulators(backend, store)
    for kind, size in sizes.items():
        travelling = [unit for unit in trained if unit.is_layer is kind and unit.index not in store.on_device]
        shared: SlabPool
        if plan.resident_gradients:
            pieces = [piece for unit in travelling for piece in pieces_of(unit, plan)]
            shared = ResidentAccumulators(backend, pieces, num_slabs=size.num_slabs, slab_bytes=size.slab_bytes)
        else:
            shared = SlabPool(
                backend,
                turning_sums(store.units, plan) if kind else (),
                num_slabs=size.num_slabs,
                num_landings=size.num_landings,
                slab_bytes=size.slab_bytes,
                accumulator_bytes=size.accumulator_bytes,
            )
        pools |= dict.fromkeys((unit.index for unit in travelling), shared)
    return {unit.index: pools.get(unit.index, home) for unit in trained}
