"""The engine: a model whose state lives @host, trained one exact step at a time.

``step`` is section 4 of the design, in order: count what the loss is divided by, send the waves through the layers, read
loss and norm in the step's one synchronisation, clip exactly, and defer the updates into the next forward. One engine
serves every model, device, objective and plan.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerferry.backends.base import Backend
from layerferry.engine.arrivals import (
    SpoiltStep,
    gradient_homes,
    half_taken,
    refuse_carried_arrivals,
    refuse_clipping,
    taken_already,
)
from layerferry.engine.batch import MicroBatch
from layerferry.engine.clock import Clock
from layerferry.engine.compiled import preparer
from layerferry.engine.deferred import DeferredSteps
from layerferry.engine.drain import Drain
from layerferry.engine.ends_in_parts import EmbeddingParts, HeadParts, refuse_undividable, refuse_whole_logits
from layerferry.engine.experts_in_parts import ExpertParts, refuse_undividable_layers, refuse_whole_layers
from layerferry.engine.feed import Feed
from layerferry.engine.isolation import IsolationCheck
from layerferry.engine.kept import KeptInputs
from layerferry.engine.one_layer import OneLayer
from layerferry.engine.pools import slab_pools, slot_pools
from layerferry.engine.pretrained import ModelFolder, save_tokenizer
from layerferry.engine.randomness import seed_of
from layerferry.engine.router_loss import RouterLoss
from layerferry.engine.sizes import PADDING, device_sizes, input_sizes, pieces_of, refuse_turning
from layerferry.engine.stages import stages_of
from layerferry.engine.sweep import Sweep
from layerferry.engine.tape import Tape, rebuilt
from layerferry.engine.templates import Templates
from layerferry.engine.wave import Wave
from layerferry.errors import LayerFerryError, PlanError
from layerferry.layout import round_up
from layerferry.models.attention_outputs import refuse_kept_attention
from layerferry.models.experts_in_parts import undividable
from layerferry.models.skeleton import Skeleton
from layerferry.objectives.base import Objective
from layerferry.objectives.cross_entropy import CrossEntropy
from layerferry.optim.base import Optimizer, StepHyper
from layerferry.plan import Plan
from layerferry.store.store import Store
from layerferry.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step was."""

    loss: float
    """Mean over the trained tokens of the whole step (the objective's own unit otherwise)."""
    grad_norm: float
    """Global 2-norm before clipping, of exactly the bytes that the optimizer reads."""
    num_targets: int
    num_tokens: int
    """Real tokens, padding not counted."""
    skipped: bool
    """The loss or norm was not finite: nothing was updated, and neither step number nor schedule should advance."""
    seconds: float
    exposed_optimizer_s: float
    """Seconds that compute stood still for a pending update (0 where not measured)."""
    exposed_link_s: float
    """Seconds that compute stood still for a copy (0 where not measured)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    loss: float
    num_targets: int


class Engine:
    """Owns slots, slabs and the optimizer's thread; the store owns the state."""

    def __init__(
        self,
        skeleton: Skeleton,
        store: Store,
        optimizer: Optimizer,
        backend: Backend,
        plan: Plan,
        *,
        seed: int = 42,
        folder: ModelFolder | None = None,
    ) -> None:
        self.skeleton, self.store, self.optimizer, self.backend = skeleton, store, optimizer, backend
        self._folder = folder
        self.max_grad_norm = 1.0
        self.num_steps = 0
        """Optimizer steps taken (deferred ones included)."""
        self.tape_type = Tape
        """What records the waves; ``anomaly.WatchfulTape`` names the first unit that is not finite."""
        self._spoilt: LayerFerryError | None = None
        """Why the weights are of no use."""
        self._seed = seed
        self._default_objective = CrossEntropy()
        self.clock = Clock(backend)
        stages = stages_of(store, optimizer, backend, self.clock, threads=plan.optimizer_threads)
        self.deferred = DeferredSteps(store, stages, backend, self.clock)
        self._allocate(plan)

    def _allocate(self, plan: Plan) -> None:
        """Slots, slabs and templates for ``plan``."""
        self.plan = plan
        skeleton, store, backend = self.skeleton, self.store, self.backend
        refuse_undividable(skeleton, plan)
        refuse_undividable_layers(plan.expert_parts, skeleton.config.model_type, undividable(skeleton.layer_units))
        refuse_whole_layers(plan)
        sizes = device_sizes(store.units, plan, store.specs)
        slots = slot_pools(store, sizes, backend, plan)
        self.feed = Feed(backend, self.clock, store, self.deferred, slots)
        refuse_carried_arrivals(plan)
        homes, self._arrivals = gradient_homes(store, self.deferred, backend, self.clock, plan)
        self.drain = Drain(backend, self.clock, store, slab_pools(store, sizes, backend, plan), homes)
        self._slots = [slot for pool in set(slots.values()) for slot in pool.slots]
        budgets = plan.layer_budgets(len(skeleton.layer_units))
        bodies = [pieces_of(unit, plan)[0] for unit in skeleton.layer_units]
        templates = Templates(skeleton, preparer(plan, skeleton.hidden_size), budgets, bodies)
        lanes = (skeleton, backend, self.feed, self.drain)
        first, last = (pieces_of(unit, plan) for unit in (skeleton.prologue_unit, skeleton.epilogue_unit))
        self._head_parts = HeadParts.of(*lanes, plan.chunk_tokens, last)
        if plan.host_inputs and not plan.row_tokens:
            raise PlanError("host_inputs: inputs can only be kept @host where the plan says how long a row is: set row_tokens")
        refuse_kept_attention(plan.kept_attention, skeleton.config.model_type, can_be_kept=skeleton.has_varlen)
        depth = (len(skeleton.layer_units), skeleton.reach.num_below)
        refuse_turning(store.units, plan, depth[1])
        self.kept = KeptInputs(backend, self.clock, input_sizes(plan, skeleton.boundary, *depth))
        ends = (EmbeddingParts.of(*lanes, first), self._head_parts)
        layer = OneLayer(skeleton, backend, self.kept, templates, IsolationCheck())
        experts = ExpertParts.of(layer, self.feed, self.drain, plan)
        self._sweep = Sweep(*lanes, layer, experts, plan.first_turning(*depth), plan.chunk_tokens, *ends)
        self._rebuilt = rebuilt(skeleton.layer_units, plan)
        self._audited = False

    def replan(self, plan: Plan) -> None:
        """Go on under another plan whose planes lie where they lie now: old buffers are freed before new ones are asked for.

        Also after a step that has failed: such a step has updated nothing. TRAP: not inside the handler that caught the error,
        whose traceback keeps the old buffers alive (tests/engine/test_replan.py). Where the new ones find no room either, the
        engine has none until ``replan`` is called again, with a smaller plan.
        """
        assert plan.on_device == self.plan.on_device and plan.on_disk == self.plan.on_disk, "planes do not move"
        assert plan.fp32 == self.plan.fp32
        self.settle()
        self.backend.synchronize()
        for name in ("feed", "drain", "kept", "_sweep", "_head_parts", "_slots", "_arrivals"):
            self.__dict__.pop(name, None)  # they may be missing: the plan before this one did not fit
        gc.collect()
        self.backend.drop_workspaces()
        self._allocate(plan)

    @property
    def moved_bytes(self) -> int:
        """Bytes that have crossed the link; for other threads, which may look while ``replan`` exchanges the buffers."""
        feed, drain, kept = (getattr(self, name, None) for name in ("feed", "drain", "kept"))
        for_updates = self.deferred.stages.moved_bytes
        return for_updates + (0 if feed is None or drain is None or kept is None else _moved(feed, drain, kept))

    # ---------------------------------------------------------------- training

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective | None = None,
        *,
        lr: float,
        max_grad_norm: float | None = None,
    ) -> StepReport:
        """One optimizer step over ``micro_batches``: the gradient is that of one batch of all their rows.

        Clips by global norm to ``max_grad_norm`` (None: the engine's own; 0: not at all). The update is deferred;
        ``settle`` completes it. Under a plan that updates on arrival, clipping is refused, and a step that is not finite raises
        ``LayerFerryError``: it has been taken. A step that breaks off with an exception has updated nothing, or else the engine
        refuses to go on.
        """
        self._refuse_spoilt()
        refuse_beyond_plan(micro_batches, self.plan)
        objective = objective or self._default_objective
        refuse_whole_logits(objective, self._head_parts)
        limit = self.max_grad_norm if max_grad_norm is None else max_grad_norm
        with self.backend.computing(), self._taking(self.num_steps + 1):
            return self._step(micro_batches, objective, lr=lr, limit=limit)

    @contextmanager
    def _taking(self, step: int) -> Iterator[None]:
        """What breaks off inside, behind the first update, leaves weights of two steps."""
        before = self.deferred.num_begun
        self.clock.forget_waits()
        try:
            yield
        except BaseException as error:
            if self.deferred.num_begun > before:
                # without a traceback, which would keep buffers alive
                self._spoilt = SpoiltStep(str(error)) if isinstance(error, SpoiltStep) else half_taken(step, error)
            raise

    def _refuse_spoilt(self) -> None:
        if self._spoilt is not None:
            raise self._spoilt.with_traceback(None)

    def _step(self, micro_batches: Sequence[MicroBatch], objective: Objective, *, lr: float, limit: float) -> StepReport:
        begin = time.perf_counter()
        denominator = objective.denominator(micro_batches)
        report = _Counts(sum(m.num_targets for m in micro_batches), sum(m.num_tokens for m in micro_batches))
        if not denominator:
            return report.report(loss=math.nan, norm=math.nan, skipped=True, begin=begin, idle={})
        hyper = StepHyper(lr=lr, step=self.num_steps + 1)
        if self._arrivals is not None:
            refuse_clipping(limit)
            self._arrivals.begin(hyper)
        loss = torch.zeros((), device=self.backend.device)
        router_loss = RouterLoss.of(self.skeleton.balance, micro_batches)
        waves = _waves(micro_batches, self.plan)
        for number, numbered in enumerate(waves):
            self.drain.last_wave = number == len(waves) - 1
            wave = Wave(
                micro_batches=numbered,
                objective=objective,
                denominator=denominator,
                step_seed=seed_of(self._seed, self.num_steps),
                tape=self.tape_type(
                    self._slots, rebuilt=self._rebuilt, audit=not self._audited, lowest=self.skeleton.reach.lowest
                ),
                carry=number > 0,
                router_loss=router_loss,
            )
            loss = self._sweep.train(wave, loss)
            self._audited = True
        loss_value, norm_value = self._read(loss, self.drain.norms)
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            if self._arrivals is not None:
                raise taken_already(hyper.step, loss_value, norm_value)
            self.feed.forget(stale=False)
            return report.report(loss=loss_value, norm=norm_value, skipped=True, begin=begin, idle=self.clock.take_waits())
        self._defer(replace(hyper, grad_scale=clip_coefficient(norm_value, limit)))
        self.num_steps += 1
        return report.report(loss=loss_value, norm=norm_value, skipped=False, begin=begin, idle=self.clock.take_waits())

    def _read(self, loss: Tensor, norms: dict[int, Tensor]) -> tuple[float, float]:
        """The one host synchronisation of a step: loss and global norm."""
        total = torch.linalg.vector_norm(torch.stack([norms[unit.index] for unit in self.store.units if unit.num_trained]))
        values = torch.stack([loss.float(), total]).tolist()
        return values[0], values[1]

    def _defer(self, hyper: StepHyper) -> None:
        self.feed.forget(stale=True)
        trained = [unit for unit in self.update_order if unit.num_trained]
        if self._arrivals is not None:  # the others have been updated
            trained = [unit for unit in trained if unit.index in self.store.on_device]
        self.deferred.defer(trained, hyper, self.drain.drained)

    # ---------------------------------------------------------------- the rest

    def evaluate(self, micro_batches: Sequence[MicroBatch], objective: Objective | None = None) -> EvalReport:
        """Mean loss over ``micro_batches`` with the weights of the latest step; pending updates are waited for unit by unit."""
        self._refuse_spoilt()
        objective = objective or self._default_objective
        refuse_whole_logits(objective, self._head_parts)
        denominator = objective.denominator(micro_batches)
        if not denominator:
            return EvalReport(loss=math.nan, num_targets=0)
        router_loss = RouterLoss.of(self.skeleton.balance, micro_batches)
        numbered = list(enumerate(micro_batches))
        total = 0.0
        wave_size = max(1, self.plan.rows_per_step // max(1, self.plan.micro_batch_rows * self.plan.num_waves))
        for start in range(0, len(micro_batches), wave_size):
            with self.backend.computing():
                wave = numbered[start : start + wave_size]
                total += float(self._sweep.evaluate(wave, objective, denominator, router_loss=router_loss))
        self.clock.forget_waits()
        return EvalReport(loss=total, num_targets=sum(m.num_targets for m in micro_batches))

    def settle(self) -> None:
        """Finish every deferred update: the store is then the model of the latest step. Raises where that is of no use."""
        self._refuse_spoilt()
        self.deferred.settle()

    def save_pretrained(self, folder: str | Path, *, tokenizer: Any = None) -> None:
        """Write a model folder that plain transformers loads; ``tokenizer`` with its chat template beside it."""
        self.settle()
        path = Path(folder)
        self.folder.write(path, self.skeleton, self.store)
        if tokenizer is not None:
            save_tokenizer(tokenizer, path)

    def close(self) -> None:
        """Stop the worker; the engine cannot be used afterwards."""
        self.deferred.close()
        self.backend.synchronize()
        self.store.close()

    @property
    def update_order(self) -> tuple[Unit, ...]:
        """Every unit, frozen ones too, in the order in which the next forward needs it."""
        last = () if self.has_tied_ends else (self.skeleton.epilogue_unit,)
        return (self.skeleton.prologue_unit, *self.skeleton.layer_units, *last)

    @property
    def has_tied_ends(self) -> bool:
        """Embedding and head share a weight, and are one unit."""
        return self.skeleton.prologue_unit is self.skeleton.epilogue_unit

    @property
    def folder(self) -> ModelFolder:
        """How the model is written."""
        assert self._folder is not None, "an engine that was built without a model folder cannot be saved"
        return self._folder

    @property
    def num_params(self) -> int:
        return self.store.num_params

    @property
    def num_trained(self) -> int:
        """Parameters that are trained; the others are frozen."""
        return self.store.num_trained


def _moved(feed: Feed, drain: Drain, kept: KeptInputs) -> int:
    return feed.uploaded_bytes + drain.drained_bytes + kept.sent_bytes + kept.returned_bytes


@dataclass(frozen=True, slots=True)
class _Counts:
    num_targets: int
    num_tokens: int

    def report(self, *, loss: float, norm: float, skipped: bool, begin: float, idle: Mapping[str, float]) -> StepReport:
        return StepReport(
            loss=loss,
            grad_norm=norm,
            num_targets=self.num_targets,
            num_tokens=self.num_tokens,
            skipped=skipped,
            seconds=time.perf_counter() - begin,
            exposed_optimizer_s=idle.get("optimizer", 0.0),
            exposed_link_s=idle.get("link", 0.0),
        )


def refuse_beyond_plan(micro_batches: Sequence[MicroBatch], plan: Plan) -> None:
    """Raise ``PlanError`` for rows or micro-batches larger than those whose bytes were planned; padding to 8 tokens is free."""
    if not plan.row_tokens:
        return
    longest = round_up(plan.row_tokens, PADDING)
    for micro_batch in micro_batches:
        rows, tokens = micro_batch.input_ids.shape
        if tokens > longest:
            raise PlanError(f"a row of {tokens} tokens; the plan is for {plan.row_tokens}: load with row_tokens={tokens}")
        if rows * tokens > plan.micro_batch_rows * longest:
            raise PlanError(
                f"a micro-batch of {rows} rows of {tokens} tokens; the plan is for {plan.micro_batch_rows} of {plan.row_tokens}: "
                f"load with micro_batch_rows={rows}"
            )


def clip_coefficient(norm: float, limit: float) -> float:
    """Factor that brings a gradient of global norm ``norm`` to at most ``limit``, as ``torch.nn.utils.clip_grad_norm_``
    computes it in fp32; 1 for limit 0."""
    if not limit:
        return 1.0
    return float((limit / (torch.tensor(norm, dtype=torch.float32) + 1e-6)).clamp(max=1.0))


def _waves(micro_batches: Sequence[MicroBatch], plan: Plan) -> list[list[tuple[int, MicroBatch]]]:
    numbered = iter(enumerate(micro_batches))
    return [list(islice(numbered, size)) for size in plan.wave_sizes(len(micro_batches))]
