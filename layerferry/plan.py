"""The frozen plan: every size, count and place of a run, and what they cost. The only input of allocation.

The planner makes it (``planner/choose.py``); the engine obeys it; a test holds the two to the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

GIB = float(2**30)
FREE_BUDGET = 0.7
"""The activation budget down to which a compiled layer loses no time (``planner/compute.py``: 624 and 629 TFLOP/s)."""


def size_text(num_bytes: float) -> str:
    """Bytes as a message shows them: ``41.2 GiB``, ``3.15 GiB``, ``21.4 MiB``, ``7.5 KiB``, ``12 bytes``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    if num_bytes < 1000 * 2**10:
        return f"{num_bytes / 2**10:.1f} KiB"
    if num_bytes < 100 * 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes < 10 * GIB else f"{num_bytes / GIB:.1f} GiB"


def value_text(value: object) -> str:
    """A setting as a config file writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of the byte table: what, where (``@host``, ``@device``, ``@disk``), bytes, and whether they are exact or an
    estimate."""

    what: str
    place: str
    num_bytes: int
    exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Predicted seconds of one optimizer step: the work of each lane, and what the compute lane stands still for."""

    compute: float
    upload: float
    download: float
    optimizer: float
    disk: float = 0.0
    """Fetches and spills of units @disk."""
    waits_for_updates: float = 0.0
    """Of units that the first wave's forward needs before the CPU has stepped them."""
    waits_for_copies: float = 0.0
    """Of weights and gradients that travel for longer than they can hide."""

    @property
    def exposed(self) -> float:
        return self.waits_for_updates + self.waits_for_copies

    @property
    def step(self) -> float:
        """The prediction."""
        return self.compute + self.exposed

    @property
    def serial(self) -> float:
        return self.compute + self.upload + self.download + self.optimizer + self.disk

    @property
    def limit(self) -> str:
        """The lane that has most to do."""
        lanes = {"compute": self.compute, "upload": self.upload, "download": self.download, "optimizer": self.optimizer}
        lanes["disk"] = self.disk
        return max(lanes, key=lambda lane: lanes[lane])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the engine builds itself from."""

    fp32: bool = False
    """Weights of four bytes without residue: CPU users and oracles."""
    num_slots: int = 3
    """Device buffers for layer weights; as many as layers: weights are resident."""
    num_slabs: int = 2
    """Device buffers that layer gradients leave from."""
    end_parts: int = 1
    """Parts in which embedding and head travel, where they do: ranges of the vocabulary."""
    expert_parts: int = 1
    """Parts in which a layer's stacked experts travel, where they do: ranges of experts. Then every layer is computed again."""
    on_device: tuple[int, ...] = ()
    """Indexes of the units whose planes, optimizer state included, live @device; nothing of them travels."""
    on_disk: tuple[int, ...] = ()
    """Indexes of the units whose residue and moments live @disk, and come to the host to be updated."""
    resident_gradients: bool = False
    """Several waves are summed @device in fp32, 4 bytes a parameter, instead of being carried @host."""
    on_arrival: bool = False
    """A unit is updated when its gradient is @host, behind the backward: gradients have a few buffers there and no planes.
    Without clipping, and a step that is not finite cannot be skipped."""
    num_waves: int = 1
    """Groups of micro-batches that pass the layers one after the other; gradients are carried between them @host."""
    first_wave: int = 0
    """Micro-batches of the first of several waves, behind whose forward the last step's updates hide; 0: as many as of others."""
    activation_budget: float = 1.0
    """Share of activations kept between forward and backward; below 1.0 without the compiler: inputs only."""
    richer_layers: int = 0
    """The last so many layers keep ``richer_budget`` of their activations instead: what the device has left is used."""
    richer_budget: float = 1.0
    turn_layers: int = 0
    """The last so many layers turn with the head: a micro-batch goes up and down through them at once, so that what they keep is
    there for one micro-batch at a time, and they keep all that saves time. Each has a slot and a sum of its own meanwhile."""
    host_inputs: int = 0
    """The first so many layers keep nothing: their inputs wait @host, and the backward computes them again, with the graph of one
    micro-batch at a time, whatever the budget of the others."""
    mlp_chunk_tokens: int = 0
    """Tokens of a row that a layer's token-wise parts see at a time; 0: all. Then every layer is computed again."""
    kept_attention: int = 0
    """Of the last so many layers, what attention kernels give stays @device and is not computed again; every layer else is."""
    compile: bool = False
    chunk_tokens: int = 4096
    """Tokens whose logits exist at the same time."""
    optimizer_threads: int = 1
    carry_fp32: bool = False
    """Gradient planes @host of four bytes: several waves lose nothing to rounding."""
    micro_batch_rows: int = 1
    row_tokens: int = 0
    """Tokens of a full row; 0: not known."""
    rows_per_step: int = 1
    items: tuple[Item, ...] = ()
    seconds: Seconds | None = None
    calibrated: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def is_exact(self) -> bool:
        """Whether no gradient is rounded between waves."""
        return self.num_waves == 1 or self.resident_gradients or self.carry_fp32 or self.fp32

    @property
    def device_units(self) -> int:
        """Units that live @device."""
        return len(self.on_device)

    @property
    def disk_units(self) -> int:
        """Units whose state is @disk."""
        return len(self.on_disk)

    def wave_sizes(self, num_micro_batches: int) -> list[int]:
        """Micro-batches of each wave of a step that has so many."""
        waves = max(1, min(self.num_waves, num_micro_batches))
        size = first = -(-num_micro_batches // waves)
        if self.first_wave and waves > 1:
            first = min(self.first_wave, num_micro_batches - waves + 1)
            size = -(-(num_micro_batches - first) // (waves - 1))
        rest = num_micro_batches - first
        return [first, *(min(size, rest - begin) for begin in range(0, rest, max(size, 1)))]

    def layer_budgets(self, num_layers: int) -> tuple[float, ...]:
        """Share of activations that each layer keeps, in layer order."""
        again, turning = self.num_rebuilt(num_layers), num_layers - self.first_turning(num_layers)
        richer = min(self.richer_layers, num_layers - again - turning)
        own = (self.activation_budget,) * (num_layers - again - richer - turning)
        return (self.free_budget,) * again + own + (self.richer_budget,) * richer + (self.free_budget,) * turning

    def num_rebuilt(self, num_layers: int) -> int:
        """Layers, from the first on, that leave no graph and are computed again in the backward."""
        return num_layers if self.rebuilds_every_layer else min(self.host_inputs, num_layers)

    @property
    def rebuilds_every_layer(self) -> bool:
        """Whether every layer is computed again, wherever its input waits."""
        return bool(self.mlp_chunk_tokens or self.kept_attention or self.expert_parts > 1)

    def first_turning(self, num_layers: int, num_below: int = 0) -> int:
        """Index of the first layer that turns with the head; ``num_layers``: none does. To ``num_below`` no backward comes."""
        return max(num_layers - self.turn_layers, self.num_rebuilt(num_layers), num_below)

    @property
    def free_budget(self) -> float:
        """What costs no time: what the graph of a layer keeps that turns, or that is computed again."""
        return FREE_BUDGET if self.compile else 1.0

    @property
    def levels(self) -> tuple[Plan, ...]:
        """This plan for each budget in it, alike for all layers: what is measured and timed one by one."""
        own = replace(self, richer_layers=0, richer_budget=1.0, host_inputs=0, kept_attention=0, turn_layers=0)
        richer = (self.richer_budget,) if self.richer_layers else ()
        again = (self.free_budget,) if self.rebuilds_every_layer or self.host_inputs or self.turn_layers else ()
        return tuple(replace(own, activation_budget=one) for one in dict.fromkeys((self.activation_budget, *richer, *again)))

    def total(self, place: str) -> int:
        """Predicted bytes at ``@host``, ``@device`` or ``@disk``."""
        return sum(item.num_bytes for item in self.items if item.place == place)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        choice = {own.name: getattr(self, own.name) for own in fields(self) if own.name not in ("items", "seconds", "notes")}
        seconds = None
        if self.seconds is not None:
            s = self.seconds
            seconds = {
                "compute": s.compute,
                "upload": s.upload,
                "download": s.download,
                "optimizer": s.optimizer,
                "disk": s.disk,
                "exposed": s.exposed,
                "waits_for_updates": s.waits_for_updates,
                "waits_for_copies": s.waits_for_copies,
                "step": s.step,
                "step_without_overlap": s.serial,
                "limit": s.limit,
            }
        items = [{"what": i.what, "place": i.place, "bytes": i.num_bytes, "exact": i.exact} for i in self.items]
        totals = {place: self.total(place) for place in ("@host", "@device", "@disk")}
        return {"choice": choice, "bytes": items, "total_bytes": totals, "seconds": seconds, "notes": list(self.notes)}
