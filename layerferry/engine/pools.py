"""Which pool of slots and accumulators each piece uses: its unit's own planes where that lives @device, else buffers of its
kind."""

from __future__ import annotations

from collections.abc import Mapping

from layerferry.backends.base import Backend
from layerferry.engine.drain import HomeAccumulators, ResidentAccumulators, SlabPool
from layerferry.engine.feed import HomePool, SlotPool
from layerferry.engine.sizes import DeviceSizes, pieces_of, turning_sums
from layerferry.plan import Plan
from layerferry.store.store import Store
from layerferry.units import Buffers, Kind


def slot_pools(store: Store, sizes: Mapping[Kind, DeviceSizes], backend: Backend, plan: Plan) -> dict[Buffers, SlotPool]:
    """The ends share their slots: they are used far apart."""
    shared = {kind: SlotPool(backend, num_slots=size.num_slots, slot_bytes=size.slot_bytes) for kind, size in sizes.items()}
    home = HomePool(backend, store, [unit for unit in store.units if unit.index in store.on_device])
    pieces = [piece for unit in store.units for piece in pieces_of(unit, plan)]
    return {piece.buffers: home if piece.index in store.on_device else shared[piece.kind] for piece in pieces}


def slab_pools(store: Store, sizes: Mapping[Kind, DeviceSizes], backend: Backend, plan: Plan) -> dict[Buffers, SlabPool]:
    """Of units that are trained."""
    trained = [unit for unit in store.units if unit.num_trained]
    home = HomeAccumulators(backend, store)
    pools: dict[Buffers, SlabPool] = {unit.buffers: home for unit in trained if unit.index in store.on_device}
    away = [piece for unit in trained if unit.index not in store.on_device for piece in pieces_of(unit, plan)]
    for kind, size in sizes.items():
        pieces = [piece for piece in away if piece.kind is kind]
        shared: SlabPool
        if plan.resident_gradients:
            shared = ResidentAccumulators(backend, pieces, num_slabs=size.num_slabs, slab_bytes=size.slab_bytes)
        else:
            shared = SlabPool(
                backend,
                turning_sums(store.units, plan) if kind is Kind.LAYERS else (),
                num_slabs=size.num_slabs,
                num_landings=size.num_landings,
                slab_bytes=size.slab_bytes,
                accumulator_bytes=size.accumulator_bytes,
            )
        pools |= dict.fromkeys((piece.buffers for piece in pieces), shared)
    return pools
