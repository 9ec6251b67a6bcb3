"""Choose a plan for a model on a machine: search, measure what the search has estimated, search again, and say what does not
fit.

On a device that can be measured the chosen plan's activations are calibrated (or read from an earlier calibration), and the
search is repeated with the measured bytes; it ends when the choice has been measured, at the latest after two measurements.
Checked by ``tests/planner/test_choose.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from layerferry.backends.base import Backend
from layerferry.config import Config
from layerferry.engine.sizes import refuse_turning
from layerferry.errors import PlanError
from layerferry.layout import GRAD, PlaneSpec
from layerferry.models.skeleton import Skeleton
from layerferry.optim.base import Optimizer
from layerferry.plan import Plan, Seconds, size_text, value_text
from layerferry.planner import calibrate
from layerferry.planner.facts import Model
from layerferry.planner.held import DISK, HOST, arrivals, unit_bytes
from layerferry.planner.machine import Machine, machine_for
from layerferry.planner.memory import plan_specs
from layerferry.planner.problem import ESTIMATE_MARGIN, Problem, fits, key_of, needs, problem, unkept
from layerferry.planner.rate import GUESS
from layerferry.planner.remedies import shortfall
from layerferry.planner.search import search
from layerferry.planner.working import Shape, Working
from layerferry.store.store import TRAVELLING, plane_specs

MOST_MEASUREMENTS = 2
"""Each compiles the layers, 20 to 40 s on a GPU where the cache does not know the plan."""
HARDLY_SLOWER = 1.03

Measure = Callable[[Plan, Shape], Working | None]
"""Calibrated bytes of a plan; None where they cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan, why it is not usable (None: it is), and the question with what was measured meanwhile, which its seconds go by."""

    plan: Plan
    shortfall: str | None
    question: Problem


def choose(
    skeleton: Skeleton,
    specs: Mapping[str, PlaneSpec],
    machine: Machine,
    config: Config,
    row_tokens: int,
    *,
    backend: Backend | None = None,
) -> Plan:
    """The plan for ``config`` with full rows of ``row_tokens``; calibrated where ``backend`` counts its bytes.

    Raises ``PlanError`` with numbers and remedies where nothing fits. Stores must be built with ``plan_specs(specs, plan)``.
    """
    question = problem(Model.of(skeleton), specs, machine, config, row_tokens)
    measure = None if backend is None else calibrate.measurer(skeleton, backend)
    decision = decide(question, measure)
    if decision.shortfall is not None:
        raise PlanError(decision.shortfall)
    return decision.plan


def choose_for(skeleton: Skeleton, optimizer: Optimizer, config: Config, backend: Backend, *, row_tokens: int) -> Plan:
    """``choose`` on the machine that this process runs on."""
    specs = plane_specs(optimizer.state_planes)
    return choose(skeleton, specs, machine_for(config.engine, backend, config.disk_folder), config, row_tokens, backend=backend)


def decide(question: Problem, measure: Measure | None = None) -> Decision:
    """The fastest plan that fits, or the one that is least short, with its shortfall. Raises ``PlanError`` where pinned slots are
    too few for the layers that turn."""
    plan, found = search(question)
    for _ in range(MOST_MEASUREMENTS if measure is not None else 0):
        if not found or plan.calibrated:
            break
        assert measure is not None
        found_now = {
            key_of(level): working
            for level in plan.levels
            if key_of(level) not in question.measured and (working := measure(level, question.shape)) is not None
        }
        if not found_now:
            break
        question = question.having(found_now)
        plan, found = search(question)
    if found and not plan.calibrated and question.measured:
        plan = _measured_or(question, plan)
    if not found and plan.on_device and "device_units" not in question.pins and not question.machine.one_memory:
        # not even all places together have room: what is said is what host and disk lack with nothing at home
        plan, found = search(replace(question, pins=replace(question.pins, device_units=0)))
    if found:
        refuse_turning(question.model.units, plan, question.model.num_below)  # as the engine will, but before weights are read
        return Decision(plan=with_notes(question, plan), shortfall=None, question=question)
    return Decision(plan=with_notes(question, plan), shortfall=shortfall(question, plan), question=question)


def _measured_or(question: Problem, plan: Plan) -> Plan:
    """The best plan of those that were measured, where it is hardly slower than ``plan``, whose bytes are an estimate."""
    measured, found = search(question, keys=question.measured)
    assert plan.seconds is not None and measured.seconds is not None
    return measured if found and measured.seconds.step <= HARDLY_SLOWER * plan.seconds.step else plan


def with_notes(question: Problem, plan: Plan) -> Plan:
    """``plan`` with what a reader must know of it."""
    notes = [
        f"{name}: {value_text(wanted)} is pinned; this model and step allow {value_text(given)}"
        for name, (wanted, given) in unkept(question.pins, plan).items()
    ]
    if plan.seconds is not None:
        notes.append(_limit(plan, plan.seconds))
    if not plan.is_exact and plan.device_units < len(question.model.units):
        notes.append(f"{plan.num_waves} waves carry gradients in bf16: one rounding a wave")
    if plan.on_arrival:
        notes.append(
            "units are updated when their gradients arrive: nothing is clipped, and a step that is not finite cannot be "
            "skipped; the run ends there"
        )
    if set(question.model.slowness) - {1.0}:
        notes.append(_timed(question.model.slowness))
    if not plan.calibrated and not question.machine.is_cpu:
        notes.append(f"activations are estimated, not measured: {ESTIMATE_MARGIN:.0%} of them is kept free")
    if plan.on_disk and plan.seconds is not None:
        notes.append(_endurance(question, plan, plan.seconds))
    if plan.on_disk and question.machine.disk_in_memory:
        notes.append(
            f"disk_folder lies in host memory (tmpfs): the {size_text(plan.total(DISK))} @disk are taken from there too, beside "
            "what is counted @host; name a folder on a disk"
        )
    there, needed = question.machine, needs(plan, question.machine)[HOST][0]
    if there.host_free is not None and needed > there.host_free and fits(question, plan):
        notes.append(
            f"host_memory: {size_text(there.host_available)}, but {size_text(there.host_free)} are free now, and this plan takes "
            f"{size_text(needed)}: unless memory grows when it is touched, the system will end the run; leave host_memory out"
        )
    limit, pinned = question.machine.locked_limit, pinned_bytes(question, plan)
    if limit is not None and not question.machine.is_cpu and pinned > limit:
        notes.append(
            f"{size_text(pinned)} are to be pinned, RLIMIT_MEMLOCK allows {size_text(limit)}: where that is enforced, copies run "
            "unpinned and slower; raise `ulimit -l`"
        )
    if question.machine.num_nodes > 1:
        notes.append(f"host memory lies on {question.machine.num_nodes} nodes: planes are spread over all of them")
    if question.machine.guessed:
        notes.append("rates are guesses: `layerferry probe` measures them")
    return replace(plan, notes=tuple(notes))


def pinned_bytes(question: Problem, plan: Plan) -> int:
    """Bytes of weights and gradients @host, which are pinned because they travel."""
    specs, home = plan_specs(question.specs, plan), frozenset(plan.on_device)
    kept = [kind for kind in TRAVELLING if kind != GRAD or not plan.on_arrival]
    planes = [unit_bytes(question.model, specs[kind]) for kind in kept]
    arriving = sum(item.num_bytes for item in arrivals(question.model, specs, plan))
    return arriving + sum(num_bytes for plane in planes for index, num_bytes in enumerate(plane) if index not in home)


def _timed(slowness: Sequence[float]) -> str:
    ratios = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(slowness), max(slowness)))
    return f"layers were timed on this device: {' to '.join(ratios)} times what its rates let expect, which the seconds go by"


def _endurance(question: Problem, plan: Plan, seconds: Seconds) -> str:
    """What the disk is asked for: all of its bytes are read and written once a step."""
    num_bytes, rate = plan.total(DISK), question.machine.disk_write_bytes_per_s
    a_day = num_bytes * 86400 / seconds.step
    guess = "; its rate is a guess: `layerferry probe --disk FOLDER` measures it" if rate.source == GUESS else ""
    return (
        f"{size_text(num_bytes)} are read from the disk and written to it every step, {a_day / 1e12:.3g} TB a day at this pace: "
        f"hold that against what the disk is rated for{guess}"
    )


def _limit(plan: Plan, seconds: Seconds) -> str:
    """What a step is made of, and what would shorten it."""
    text = f"the step is {seconds.compute / seconds.step:.0%} compute"
    if seconds.compute > 0.99 * seconds.step:
        return text + ": nothing is waited for"
    if seconds.waits_for_updates >= seconds.waits_for_copies:
        return f"{text}; it waits for updates of units @host, which the first wave's forward is too short to hide"
    return f"{text}; it waits for copies, which are slower than what they should hide behind"
