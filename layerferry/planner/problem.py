"""The question that a choice answers: a model, its planes, a machine, what a step is made of, what the user has pinned, and what
was measured.

Also what "fits" means: bytes needed against bytes there, by place. Estimated activations must fit with a margin; a budget
that the user wrote is used to the last byte, one that the system reports not quite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import geometric_mean

from layerferry.config import Config, EngineConfig, Pins
from layerferry.engine.experts_in_parts import refuse_undividable_layers, refuse_whole_layers
from layerferry.errors import PlanError
from layerferry.layout import PlaneSpec, round_up
from layerferry.models.attention_outputs import refuse_kept_attention
from layerferry.plan import Plan, Seconds
from layerferry.planner.compute import pace
from layerferry.planner.estimate import estimate
from layerferry.planner.facts import Model
from layerferry.planner.held import DEVICE, DISK, HOST
from layerferry.planner.machine import Machine
from layerferry.planner.memory import items
from layerferry.planner.time import seconds
from layerferry.planner.updates import with_update_rate
from layerferry.planner.working import Shape, Working

ESTIMATE_MARGIN = 0.05
"""Room for activations that are estimated, as a share of them."""
FRAGMENTATION = 0.02
"""Share of the free device bytes that the allocator cannot use."""
HOST_RESERVE = 0.02
"""Share of the free host bytes that is left to everything else."""
BELIEVED = 1.15
"""What a layer's seconds must differ by from ``compute.py`` to be believed. They are those of a cool device, which is up to a
tenth faster than one in the middle of a step; the constants are fitted to whole steps, but to few families and one device."""
ROW_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens (data/batches.py)."""

Key = tuple[float, int, int, bool, int, int, int]
"""(activation budget, rows, chunk tokens, compiled, parts of the ends, of experts, tokens of an MLP's chunk): what a measurement
of activations depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a choice depends on. ``measured``: calibrated bytes."""

    model: Model
    specs: Mapping[str, PlaneSpec]
    machine: Machine
    shape: Shape
    pins: Pins
    fp32: bool
    user_rows: int
    """per_device_train_batch_size: rows of a micro-batch on a CPU."""
    on_arrival: bool = False
    """The user wants units updated when their gradients arrive."""
    measured: Mapping[Key, Working] = field(default_factory=dict)

    def having(self, found: Mapping[Key, Working]) -> Problem:
        """With further measurements: of bytes, which replace estimates, and of layers' seconds."""
        measured = {**self.measured, **found}
        return replace(self, measured=measured, model=replace(self.model, slowness=self._slowness(measured)))

    def _slowness(self, measured: Mapping[Key, Working]) -> tuple[float, ...]:
        """By behaviour, the mean over all levels that were timed."""
        plain, ratios = replace(self.model, slowness=()), []
        for key, working in measured.items():
            if working.layer_s:
                expected = pace(plain, self._level(key), self.shape, self.machine).layers
                ratios.append([sum(seen) / sum(own) for seen, own in zip(working.layer_s, expected, strict=True)])
        means = [geometric_mean(own) for own in zip(*ratios, strict=True)]
        return tuple(mean if max(mean, 1 / mean) > BELIEVED else 1.0 for mean in means)

    def _level(self, key: Key) -> Plan:
        """The layers' part of the plan that ``key`` is the key of."""
        budget, rows, chunk, compiled, parts, experts, inner = key
        return Plan(
            fp32=self.fp32,
            activation_budget=budget,
            micro_batch_rows=rows,
            chunk_tokens=chunk,
            compile=compiled,
            end_parts=parts,
            expert_parts=experts,
            mlp_chunk_tokens=inner,
            row_tokens=self.shape.row_tokens,
            rows_per_step=self.shape.rows_per_step,
        )

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled: as pinned, else on every device but a CPU."""
        return self.pins.compile if self.pins.compile is not None else not self.machine.is_cpu

    def complete(self, plan: Plan) -> Plan:
        """``plan`` with its bytes and seconds."""
        working = self.working(plan)
        return replace(
            plan,
            items=items(self.model, self.specs, plan, self.shape, working),
            seconds=self.seconds(plan),
            calibrated=working.measured,
        )

    def seconds(self, plan: Plan) -> Seconds:
        """What ``plan`` is predicted to take."""
        return seconds(self.model, self.specs, plan, self.shape, self.machine)

    def working(self, plan: Plan) -> Working:
        """Bytes of one micro-batch's activations, measured where they have been."""
        own, *others = [self.measured.get(key_of(level)) or self._corrected(level) for level in plan.levels]
        return own.beside(others) if others else own

    def _corrected(self, plan: Plan) -> Working:
        """The estimate; where the same budget was measured for other rows, chunks or parts, times what that estimate was off."""
        guess = estimate(self.model, plan, self.shape)
        for key, measured in self.measured.items():
            budget, _, _, compiled, _, experts, inner = key
            own = (plan.activation_budget, plan.compile, plan.expert_parts, plan.mlp_chunk_tokens)
            if (budget, compiled, experts, inner) == own:
                return guess.times(measured, estimate(self.model, self._level(key), self.shape))
        return guess


def key_of(plan: Plan) -> Key:
    own = (plan.activation_budget, plan.micro_batch_rows, plan.chunk_tokens, plan.compile)
    return (*own, plan.end_parts, plan.expert_parts, plan.mlp_chunk_tokens)


def problem(model: Model, specs: Mapping[str, PlaneSpec], machine: Machine, config: Config, row_tokens: int) -> Problem:
    """The question that ``config`` asks, with full rows of ``row_tokens``. Raises ``PlanError`` for a pin that cannot be kept."""
    pinned = config.engine.end_parts or 1
    if pinned > 1 and model.undividable is not None:
        raise PlanError(f"end_parts: {pinned}: {model.name}: {model.undividable}: end_parts: 1 feeds the ends whole")
    refuse_undividable_layers(config.engine.expert_parts or 1, model.name, model.undividable_layers)
    if config.engine.disk_units and not config.engine.disk_memory:
        raise PlanError(f"disk_units: {config.engine.disk_units}: set disk_memory too: the bytes of the disk that may be taken")
    _refuse_contradictions(config.engine, model)
    refuse_kept_attention(config.engine.kept_attention, model.name, can_be_kept=model.attention_bytes > 0)
    train, data = config.train, config.data
    packed = data.neat_packing or (data.packing if data.packing is not None else train.stage == "pt")
    shape = Shape(
        row_tokens=round_up(row_tokens, ROW_MULTIPLE),
        rows_per_step=train.per_device_train_batch_size * train.gradient_accumulation_steps,
        isolated=data.neat_packing,
        packed=packed,
        evaluates=train.do_eval or train.eval_strategy != "no",
        fused_head=not machine.is_cpu,
    )
    return Problem(
        model=model,
        specs=specs,
        machine=with_update_rate(machine, specs),
        shape=shape,
        pins=pins_of(config),
        fp32=train.fp32,
        on_arrival=config.engine.update_on_arrival,
        user_rows=train.per_device_train_batch_size,
    )


def pins_of(config: Config) -> Pins:
    """Without gradient checkpointing, everything is kept unless another share is asked for."""
    found = {field.name: getattr(config.engine, field.name) for field in fields(Pins)}
    if found["activation_budget"] is None and not config.train.gradient_checkpointing:
        found["activation_budget"] = 1.0
    return Pins(**found)


def _refuse_contradictions(engine: EngineConfig, model: Model) -> None:
    """Pins that no plan can keep together."""
    at_home, on_disk = engine.device_units or 0, engine.disk_units or 0
    if at_home and on_disk and at_home + on_disk > len(model.units):
        raise PlanError(
            f"device_units: {at_home} and disk_units: {on_disk} are more than the model's {len(model.units)} units: "
            "state lives in one place"
        )
    if (engine.expert_parts or 1) > 1 and at_home > model.most_beside_parts:
        whole = sum(bool(unit.is_layer and unit.tables) for unit in model.units[:at_home])
        raise PlanError(
            f"device_units: {at_home}: {whole} layer{'s' * (whole > 1)} of experts would be at home, whole, and expert_parts: "
            f"{engine.expert_parts} cuts them; set device_units to {model.most_beside_parts} or lower, or leave one of them out"
        )
    refuse_whole_layers(engine)
    again = next((name for name in ("mlp_chunk_tokens", "kept_attention") if getattr(engine, name)), None)
    if engine.richer_layers and again is not None:
        raise PlanError(
            f"richer_layers: {engine.richer_layers}: with {again} every layer is computed again; leave one of them out"
        )
    if engine.turn_layers and engine.richer_layers:
        raise PlanError(
            f"turn_layers: {engine.turn_layers} and richer_layers: {engine.richer_layers} are both the last layers; leave one out"
        )
    if engine.turn_layers and again is not None:
        raise PlanError(f"turn_layers: {engine.turn_layers}: with {again} every layer is computed again; leave one of them out")
    if engine.turn_layers and (engine.end_parts or 1) > 1:
        raise PlanError(
            f"turn_layers: {engine.turn_layers}: layers turn with a whole head, and end_parts: {engine.end_parts} cuts it; leave "
            "one of them out"
        )
    if engine.update_on_arrival and engine.resident_gradients is False and engine.first_wave:
        raise PlanError(
            f"first_wave: {engine.first_wave}: with update_on_arrival: true and resident_gradients: false there is one wave, the "
            "first and the last; leave one of them out"
        )
    if engine.first_wave and engine.num_waves == 1:
        raise PlanError(f"first_wave: {engine.first_wave}: num_waves: 1 is the first and the last; leave one of them out")
    if engine.update_on_arrival and engine.carry_fp32:
        raise PlanError("carry_fp32: true: with update_on_arrival: true no gradients are kept; leave one of them out")
    if engine.update_on_arrival and engine.resident_gradients is False and (engine.num_waves or 1) > 1:
        raise PlanError(
            f"resident_gradients: false: with update_on_arrival: true the {engine.num_waves} waves can only be summed on the "
            "device; num_waves: 1 sums nothing"
        )
    if engine.resident_gradients and engine.carry_fp32:
        raise PlanError("carry_fp32: true: with resident_gradients: true no gradients are carried; leave one of them out")


def unkept(pins: Pins, plan: Plan) -> dict[str, tuple[float, float]]:
    """Field -> (what is pinned, what ``plan`` has), where they differ: model or step allow no more. Gradients of fp32 runs have
    four bytes, which is all that ``carry_fp32`` asks for."""
    both = {name: (wanted, getattr(plan, name)) for name, wanted in pins.items()}
    differing = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    return {name: pair for name, pair in differing.items() if not (name == "carry_fp32" and plan.fp32)}


def device_budget(machine: Machine) -> int:
    """Bytes that may be planned: the allocator, which must do with what there is, leaves holes."""
    return int(machine.device_available * (1 - FRAGMENTATION))


def host_budget(machine: Machine) -> int:
    exact = machine.host_source == "host_memory"
    return machine.host_available if exact else int(machine.host_available * (1 - HOST_RESERVE))


def needs(plan: Plan, machine: Machine) -> dict[str, tuple[int, int]]:
    """Place -> (bytes needed, bytes there). Where both are one memory, what both need counts against it once."""
    margin = int(ESTIMATE_MARGIN * sum(i.num_bytes for i in plan.items if not i.exact))
    return places(plan.total(HOST), plan.total(DEVICE) + margin, machine, disk=plan.total(DISK))


def places(host: int, device: int, machine: Machine, *, disk: int = 0) -> dict[str, tuple[int, int]]:
    """The same for bytes that are known, margins included."""
    on_disk = {DISK: (disk, machine.disk_available)} if disk else {}
    if not machine.one_memory:
        return {HOST: (host, host_budget(machine)), DEVICE: (device, device_budget(machine)), **on_disk}
    own = {} if machine.shares_budget else {DEVICE: (device, device_budget(machine))}
    return {HOST: (host + device, host_budget(machine)), **own, **on_disk}


def budget_source(machine: Machine, place: str) -> str:
    """Who says how many bytes ``place`` has: the key that the user has set, or what was asked."""
    return {HOST: machine.host_source, DEVICE: machine.device_source, DISK: machine.disk_source}[place]


def fits(question: Problem, plan: Plan) -> bool:
    return all(needed <= there for needed, there in needs(plan, question.machine).values())
