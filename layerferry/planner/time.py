"""Predicted seconds of one step: the compute of its pieces, and what compute waits for.

A lane's time is its work over the machine's rate: ``compute.py`` for products and passes, bytes over the link's rate,
parameters over the optimizer's. The step is the compute lane's work plus the waits that ``schedule.py`` finds when it plays
the engine's program: for updates that the first wave's forward needs before the worker has made them, and for copies that are
slower than what they should hide behind. A CPU that plays the device copies and computes in one place, so there the step is
the sum. Checked by ``tests/planner/test_time.py`` (upload counts against the engine's own feed, seconds against measured rows).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from layerferry.engine.sizes import PART_BUFFERS, pieces_of
from layerferry.layout import GRAD, WEIGHT, PlaneSpec
from layerferry.plan import Plan, Seconds
from layerferry.planner import compute
from layerferry.planner.facts import Model
from layerferry.planner.held import disk_bytes, unit_bytes
from layerferry.planner.machine import Machine
from layerferry.planner.memory import plan_specs
from layerferry.planner.part_slots import PartSlots, head_part, prologue_part, uses_of_ends
from layerferry.planner.program import Piece, Program
from layerferry.planner.schedule import waits
from layerferry.planner.updates import finish_s, orthogonal_s, trip_bytes, update_s
from layerferry.planner.working import Shape, tokens_of
from layerferry.units import Piece as UnitPiece
from layerferry.units import Unit


def seconds(model: Model, specs: Mapping[str, PlaneSpec], plan: Plan, shape: Shape, machine: Machine) -> Seconds:
    """One optimizer step of ``plan`` on ``machine``."""
    lanes = busy(model, specs, plan, shape, machine)
    if machine.is_cpu:
        updates, copies = max(lanes.optimizer, lanes.disk), lanes.upload + lanes.download
        return replace(lanes, waits_for_updates=updates, waits_for_copies=copies)
    specs = plan_specs(specs, plan)
    slower = beside_copies(lanes.optimizer, model, specs, plan, shape, machine)
    found = waits(program(model, specs, plan, shape, machine, slower))
    return replace(lanes, optimizer=slower * lanes.optimizer, waits_for_updates=found.updates, waits_for_copies=found.copies)


def busy(model: Model, specs: Mapping[str, PlaneSpec], plan: Plan, shape: Shape, machine: Machine) -> Seconds:
    """What each lane has to do, each alone and nothing waited for: at most the step."""
    specs = plan_specs(specs, plan)
    home = frozenset(plan.on_device)
    travelling = [unit for unit in model.units if unit.index not in home]
    grads = unit_bytes(model, specs[GRAD])
    grad_bytes = sum(grads[unit.index] for unit in travelling)
    rounds = len(waves_of(plan, shape))
    carried = 0 if plan.resident_gradients else rounds - 1
    inputs = model.num_inputs_at_host(plan.host_inputs) * shape.tokens_per_step * model.boundary
    trips = sum(trip_bytes(unit.layout, specs) for unit in travelling)
    up = uploaded_bytes(model, plan, specs) + carried * grad_bytes + inputs + trips
    return Seconds(
        compute=compute_s(model, plan, shape, machine) + sum(orthogonal_s(unit.layout, machine) for unit in model.units),
        upload=up / machine.upload_together_bytes_per_s.value,
        download=((carried + 1) * grad_bytes + inputs + trips) / machine.download_together_bytes_per_s.value,
        optimizer=sum(update_s(unit.layout, machine) for unit in travelling),
        disk=sum(sum(disk_seconds(model.units[index], specs, machine)) for index in plan.on_disk),
    )


def beside_copies(
    alone: float, model: Model, specs: Mapping[str, PlaneSpec], plan: Plan, shape: Shape, machine: Machine
) -> float:
    """How many times longer updates of ``alone`` seconds take: they run behind the first wave's forward, and what travels then,
    weights up and kept inputs down, takes its bytes a second from the host memory's."""
    home, wave = frozenset(plan.on_device), waves_of(plan, shape)[0]
    forward = wave * sum(own for own, _ in compute.layer_paces(model, plan, shape, machine))
    weights = sum(size for index, size in enumerate(unit_bytes(model, specs[WEIGHT])) if index not in home)
    inputs = wave * model.num_inputs_at_host(plan.host_inputs) * tokens_of(plan, shape) * model.boundary
    most = machine.upload_together_bytes_per_s.value + machine.download_together_bytes_per_s.value
    return 1 + min((weights + inputs) / max(forward, alone), most) / machine.dram_bytes_per_s.value


def disk_seconds(unit: Unit, specs: Mapping[str, PlaneSpec], machine: Machine) -> tuple[float, float]:
    """Of one fetch and one spill."""
    num_bytes = disk_bytes(unit, specs)
    return num_bytes / machine.disk_read_bytes_per_s.value, num_bytes / machine.disk_write_bytes_per_s.value


def compute_s(model: Model, plan: Plan, shape: Shape, machine: Machine) -> float:
    """The compute lane's work: micro-batches, drains, and updates @device."""
    own = compute.pace(model, plan, shape, machine)
    micro_batches = shape.rows_per_step / min(plan.micro_batch_rows, shape.rows_per_step)
    total = micro_batches * (own.ends + sum(map(sum, compute.layer_paces(model, plan, shape, machine))))
    if machine.is_cpu:
        return total
    home = sum(model.units[index].num_trained for index in plan.on_device)
    drains = 1 if plan.resident_gradients else len(waves_of(plan, shape))
    return (
        total
        + compute.drain_s(home, machine)
        + drains * compute.drain_s(model.num_trained - home, machine)
        + compute.home_step_s(home, machine)
    )


def waves_of(plan: Plan, shape: Shape) -> list[float]:
    """Micro-batches of each wave, as the engine cuts them; a last micro-batch of fewer rows counts by its share."""
    micro_batches = shape.rows_per_step / min(plan.micro_batch_rows, shape.rows_per_step)
    waves: list[float] = [*plan.wave_sizes(math.ceil(micro_batches))]
    waves[-1] += micro_batches - math.ceil(micro_batches)
    return waves


def program(model: Model, specs: Mapping[str, PlaneSpec], plan: Plan, shape: Shape, machine: Machine, slower: float) -> Program:
    """What ``schedule.py`` plays. Copies run at the rate of both directions together where gradients are carried or inputs
    travel; updates take ``slower`` times as long as alone."""
    own, home, on_disk = compute.pace(model, plan, shape, machine), frozenset(plan.on_device), frozenset(plan.on_disk)
    waves = waves_of(plan, shape)
    both = model.num_inputs_at_host(plan.host_inputs) > 0 or (len(waves) > 1 and not plan.resident_gradients)
    up = (machine.upload_together_bytes_per_s if both else machine.upload_bytes_per_s).value
    down = (machine.download_together_bytes_per_s if both else machine.download_bytes_per_s).value
    weights, grads = unit_bytes(model, specs[WEIGHT]), unit_bytes(model, specs[GRAD])

    one_input = tokens_of(plan, shape) * model.boundary

    def piece(index: int, forward: float, backward: float, share: float = 1.0, *, travels: bool = False) -> Piece:
        layout = model.units[index].layout
        trained = share * layout.num_trained
        fetch, spill = disk_seconds(model.units[index], specs, machine) if index in on_disk else (0.0, 0.0)
        return Piece(
            fetch=share * fetch,
            spill=share * spill,
            forward=share * forward,
            backward=share * backward,
            drain=compute.drain_s(trained, machine),
            update=slower * share * update_s(layout, machine),
            finish=slower * share * finish_s(layout, machine),
            orthogonal=share * orthogonal_s(layout, machine),
            trip=share * trip_bytes(layout, specs) * (1 / up + 1 / down),
            upload=share * weights[index] / up,
            bring=share * grads[index] / up,
            send=share * grads[index] / down,
            home=index in home,
            trained=trained > 0,
            input_down=one_input / down if travels else 0.0,
            input_up=one_input / up if travels else 0.0,
        )

    def end(pieces: Sequence[UnitPiece], forward: float, backward: float) -> list[Piece]:
        """Each part with its share of the whole."""
        shares = [piece(one.index, forward, backward, one.layout.numel / one.unit.numel) for one in pieces]
        return [replace(share, trained=one.num_trained > 0) for share, one in zip(shares, pieces, strict=True)]

    def layer(unit: Unit, forward: float, backward: float, *, travels: bool) -> Piece:
        """Experts that travel in parts come twice on the way down."""
        own, (body, *parts) = piece(unit.index, forward, backward, travels=travels), pieces_of(unit, plan)
        return replace(own, upload_again=own.upload * (1 - body.layout.numel / unit.numel)) if parts else own

    in_parts = any(len(pieces_of(unit, plan)) > 1 for unit in model.layer_units)
    paces = compute.layer_paces(model, plan, shape, machine)
    first, last = model.pieces_of_ends(plan)
    return Program(
        prologue=end(first, *own.embedding),
        layers=[
            layer(unit, *both_ways, travels=model.num_below <= number < plan.host_inputs)
            for number, (unit, both_ways) in enumerate(zip(model.layer_units, paces, strict=True))
        ],
        head=end(last, *((own.head, 0.0) if len(last) == 1 else (own.look, own.head - own.look))),
        tied=model.tied,
        waves=waves,
        num_slots=PART_BUFFERS if in_parts else plan.num_slots,
        num_slabs=plan.num_slabs,
        resident_gradients=plan.resident_gradients,
        num_turning=model.num_layers - plan.first_turning(model.num_layers, model.num_below),
        num_below=model.num_below,
        on_arrival=plan.on_arrival,
        in_parts=in_parts,
        home_step_s=compute.home_step_s(sum(model.units[index].num_trained for index in home), machine)
        + sum(orthogonal_s(model.units[index].layout, machine) for index in home),
    )


def layer_uploads(num_layers: int, num_below: int, num_slots: int, num_waves: int) -> int:
    """Layer uploads of one step, ``num_below`` of them in the forward alone: slots still hold ``num_slots`` layers at each turn;
    every step begins with new weights. A later wave finds in its slots what the backward has used last: the lowest layers
    that it comes to, which make room for those below them."""
    missed_below = max(num_layers - num_below - num_slots, 0)
    later = min(num_layers + missed_below, 2 * max(num_layers - num_slots, 0))
    return num_layers + missed_below + (num_waves - 1) * later


def travelling_below(model: Model, home: Collection[int]) -> int:
    """Layers below everything that is trained, but for those at home."""
    return sum(unit.index not in home for unit in model.layer_units[: model.num_below])


def uploaded_bytes(model: Model, plan: Plan, specs: Mapping[str, PlaneSpec]) -> int:
    """Weight bytes that a step uploads; layers of unequal size count with their mean."""
    home = frozenset(plan.on_device)
    layers = [pieces_of(unit, plan)[0].layout.bytes(specs[WEIGHT]) for unit in model.layer_units if unit.index not in home]
    uploads = layer_uploads(len(layers), travelling_below(model, home), plan.num_slots, plan.num_waves)
    in_layers = uploads * sum(layers) // max(len(layers), 1)
    return in_layers + _uploaded_by_ends(model, plan, specs[WEIGHT]) + _uploaded_by_experts(model, plan, specs[WEIGHT])


def _uploaded_by_ends(model: Model, plan: Plan, spec: PlaneSpec) -> int:
    """By playing the uses of their slots; from the second wave on, all are alike."""
    first, last = model.pieces_of_ends(plan)
    sizes = {prologue_part(piece.number): piece.layout.bytes(spec) for piece in first}
    sizes |= {head_part(piece.number): piece.layout.bytes(spec) for piece in last}
    home = {"prologue_home": first[0].index in plan.on_device, "head_home": last[0].index in plan.on_device}
    uses = uses_of_ends(len(first), len(last), tied=model.tied, **home)
    return _uploaded(uses, sizes, plan, PART_BUFFERS if max(len(first), len(last)) > 1 else 1)


def _uploaded_by_experts(model: Model, plan: Plan, spec: PlaneSpec) -> int:
    """Of layers whose experts travel in parts."""
    sizes: list[int] = []
    by_layer = []
    for unit in model.layer_units:
        parts = pieces_of(unit, plan)[1:]
        by_layer.append(range(len(sizes), len(sizes) + len(parts)))
        sizes += [part.layout.bytes(spec) for part in parts]
    uses = [number for own in by_layer for number in own]
    for own in reversed(by_layer[model.num_below :]):
        uses += [*own, *reversed(own)]
    return _uploaded(uses, dict(enumerate(sizes)), plan, PART_BUFFERS)


def _uploaded(uses: Sequence[int], sizes: Mapping[int, int], plan: Plan, num_slots: int) -> int:
    """Bytes of all waves that ``uses`` of pieces of these ``sizes`` upload."""
    slots = PartSlots(num_slots)
    by_wave = []
    for _ in range(min(plan.num_waves, 3)):
        begun = slots.expect(uses)
        for _ in uses:
            begun += slots.used(0.0)
        by_wave.append(sum(sizes[piece] for piece, _ in begun))
    return sum(by_wave) + max(plan.num_waves - len(by_wave), 0) * by_wave[-1]
