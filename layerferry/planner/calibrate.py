"""Measure what the compiler and autograd keep, and how long layers take: each distinct layer once, forward and backward, and the
head, at the plan's own shape.

The measured object is the engine's: the tape, the template as the plan prepares it, the objective, over scratch slots with
random weights. Differences of the backend's count of allocated bytes are all that is used, so whatever else is allocated
cancels:

- a layer's ``kept``: allocated after its forward minus before (its output and what was saved; the input was there before);
- its ``forward_peak`` and ``backward_peak``: the peak minus what was allocated before. Before the backward the kept tensors
  and the incoming gradient are there, as in the sweep;
- the head's ``head_peak`` the same way, with every token trained: the fullest case; or that of the load-balancing loss;
- a layer's seconds, forward and backward, but where token-wise parts run in chunks: of rows so long, attention is most, and
  whether it runs twice is another choice;
- ``workspaces``: what stays allocated once everything is gone (matrix libraries' buffers, which a new process lacks).

Everything runs twice and the second run counts: the first compiles and tunes. Results are cached per user, keyed by whatever
could change them. Checked by ``tests/planner/test_calibrate.py`` with a backend that counts CPU tensors.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from layerferry.backends.base import Backend
from layerferry.config import cache_folder
from layerferry.engine.batch import MicroBatch
from layerferry.engine.compiled import preparer
from layerferry.engine.ends_in_parts import block_of
from layerferry.engine.feed import Slot
from layerferry.engine.router_loss import RouterLoss
from layerferry.engine.sizes import pieces_of
from layerferry.engine.tape import SideGradients, Tape, rebuilt
from layerferry.engine.templates import Templates
from layerferry.layout import FP32_PLANE, WEIGHT_PLANE, Plane
from layerferry.models.embedding import EmbeddingTap, ServedTap
from layerferry.models.inputs import Inputs
from layerferry.models.skeleton import Skeleton
from layerferry.models.stack import LayerCall
from layerferry.models.tables import standing_in
from layerferry.objectives import CrossEntropy, Head
from layerferry.objectives.head_in_parts import Tokens
from layerferry.plan import GIB, Plan
from layerferry.planner.working import LayerBytes, Shape, Working
from layerferry.units import Piece
from layerferry.version import VERSION

log = logging.getLogger(__name__)

T = TypeVar("T")


def measurer(skeleton: Skeleton, backend: Backend) -> Callable[[Plan, Shape], Working | None] | None:
    """What ``decide`` calls for a plan's bytes: the cache, or a measurement now. None for a backend that does not count."""
    if not counts(backend):
        return None

    def measure(plan: Plan, shape: Shape) -> Working | None:
        if plan.expert_parts > 1:
            return None  # its layers have no room here to be measured whole
        path = cache_file(skeleton, backend, plan, shape)
        known = _read(path)
        if known is None:
            log.info(
                "measuring activations: %d rows of %d tokens, budget %g",
                plan.micro_batch_rows,
                shape.row_tokens,
                plan.activation_budget,
            )
            try:
                known = calibrate(skeleton, backend, plan, shape)
            except torch.OutOfMemoryError:
                log.warning("the device is too full to measure activations: the plan's bytes are an estimate")
                return None
            _write(path, known)
        return known

    return measure


def reader(skeleton: Skeleton, backend: Backend) -> Callable[[Plan, Shape], Working | None]:
    """The same from the cache alone."""
    return lambda plan, shape: _read(cache_file(skeleton, backend, plan, shape))


def counts(backend: Backend) -> bool:
    """Whether ``backend`` knows how many bytes are allocated."""
    before = backend.allocated_bytes()
    probe = backend.device_buffer(1 << 10)
    return backend.allocated_bytes() > before and probe.numel() > 0


def calibrate(skeleton: Skeleton, backend: Backend, plan: Plan, shape: Shape) -> Working:
    """Measure one micro-batch of ``plan``. The skeleton's ends are unbound afterwards."""
    gc.collect()
    backend.drop_workspaces()
    before = backend.allocated_bytes()
    bench = _Bench(skeleton, backend, plan, shape)
    try:
        with backend.computing():
            hidden, calls, prologue_kept = bench.prologue()
            firsts = [skeleton.keys.index(key) for key in dict.fromkeys(skeleton.keys)]
            layers, layer_s = zip(*(bench.layer(index, hidden, calls[index]) for index in firsts), strict=True)
            head_peak, evaluation_peak, head_kept = bench.head(hidden.detach())
            router_gradients, router_peak = bench.router_loss()
            head_peak = max(
                head_peak, hidden.untyped_storage().nbytes() + router_peak
            )  # it runs when the head's gradient is there
    finally:
        bench.close()
    del hidden, calls, bench
    gc.collect()
    backend.synchronize()
    workspaces = max(backend.allocated_bytes() - before, 0)
    working = Working(
        prologue_kept=prologue_kept,
        layers=layers,
        head_peak=head_peak,
        head_kept=head_kept,
        evaluation_peak=evaluation_peak,
        router_gradients=router_gradients,
        workspaces=workspaces,
        measured=True,
        layer_s=() if plan.mlp_chunk_tokens else layer_s,
    )
    log.debug("measured %s; workspaces %.3f GiB", working, workspaces / GIB)
    return working


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one piece of work: bytes that stay and peak, both above the level before, and seconds."""

    kept: int
    peak: int
    seconds: float


class _Bench:
    """Scratch slots and accumulators, and the three things that are measured on them."""

    def __init__(self, skeleton: Skeleton, backend: Backend, plan: Plan, shape: Shape) -> None:
        self._skeleton, self._backend, self._plan = skeleton, backend, plan
        layers, travelling = skeleton.layer_units, replace(plan, on_device=())
        self._ends = {unit.index: pieces_of(unit, travelling) for unit in skeleton.units if not unit.is_layer}
        ends = [piece for pieces in self._ends.values() for piece in pieces]
        self._generator = torch.Generator(device=backend.device).manual_seed(0)
        kinds: tuple[tuple[bool, Sequence[Piece]], ...] = ((True, layers), (False, ends))
        self._slots = {kind: self._slot(pieces) for kind, pieces in kinds}
        self._sums = {kind: backend.device_buffer(max(p.layout.bytes(FP32_PLANE) for p in pieces)) for kind, pieces in kinds}
        self._templates = Templates(skeleton, preparer(plan, skeleton.hidden_size), plan.layer_budgets(len(layers)), layers)
        self._routed: dict[Hashable, list[Tensor]] = {}
        self._micro_batch = _micro_batch(plan, shape, skeleton.vocab_size)
        self._tape = Tape(list(self._slots.values()), rebuilt=rebuilt(layers, plan), audit=False)

    def _slot(self, pieces: Sequence[Piece]) -> Slot:
        buffer = self._backend.device_buffer(max(piece.layout.bytes(WEIGHT_PLANE) for piece in pieces))
        return Slot(buffer)

    def _fill(self, piece: Piece) -> Plane:
        plane = Plane(piece.layout, WEIGHT_PLANE, self._slots[piece.unit.is_layer].buffer)
        for section in plane.tensors():
            section.normal_(0.0, 0.02, generator=self._generator)
        return plane

    def close(self) -> None:
        """Leave the ends on ``meta``: nothing of the scratch memory is held."""
        for unit in self._skeleton.units:
            if not unit.is_layer:
                empty = torch.empty(unit.layout.bytes(WEIGHT_PLANE), dtype=torch.uint8, device="meta")
                self._skeleton.bind(unit, Plane(unit.layout, WEIGHT_PLANE, empty))

    def _look(self, work: Callable[[], T]) -> tuple[T, _Seen]:
        """The result with what was seen."""
        self._backend.synchronize()
        before = self._backend.allocated_bytes()
        self._backend.reset_peak()
        begin = time.perf_counter()
        result = work()
        self._backend.synchronize()
        seconds = time.perf_counter() - begin
        return result, _Seen(self._backend.allocated_bytes() - before, self._backend.peak_bytes() - before, seconds)

    def prologue(self) -> tuple[Tensor, list[LayerCall], int]:
        unit = self._skeleton.prologue_unit
        first, *others = self._ends[unit.index]
        parameters = self._skeleton.bind(first, self._fill(first))

        def run() -> Any:
            put = self._backend.to_device
            ids = put(self._micro_batch.input_ids)
            positions = None if self._micro_batch.position_ids is None else put(self._micro_batch.position_ids)
            mask = torch.ones_like(ids) if positions is not None and not self._micro_batch.isolated else None
            trains = self._skeleton.reach.trains_prologue
            with ExitStack() as bound:
                bound.enter_context(self._tape.record(unit, self._slots[False]))
                bound.enter_context(torch.set_grad_enabled(trains))
                tap = EmbeddingTap([parameter for parameter in parameters if parameter.requires_grad])
                if others:
                    tables = bound.enter_context(standing_in(self._skeleton, unit, self._backend.device))
                    rows = [torch.randn(ids.numel(), t.shape[1], dtype=t.dtype, device=t.device) for t in tables]
                    tap = ServedTap(parameters, ids, list(zip(tables, rows, strict=True)))
                hidden, calls = self._skeleton.prologue(Inputs(ids, positions, mask), tap)
            return hidden, calls, tap.look_ups

        run()
        (hidden, calls, _), seen = self._look(run)
        return hidden, calls, seen.kept

    def layer(self, index: int, hidden: Tensor, call: LayerCall) -> tuple[LayerBytes, tuple[float, float]]:
        """Bytes, and seconds of (forward, backward)."""
        unit, slot = self._skeleton.layer_units[index], self._slots[True]
        self._fill(unit)
        accumulator = Plane(unit.layout, FP32_PLANE, self._sums[True])
        accumulator.buffer.zero_()
        template = self._templates.bound(index, slot)

        def forward() -> None:
            with self._tape.record(unit, slot):
                self._tape.forward(unit, 0, template, hidden, call)

        def backward() -> None:
            with self._tape.resolving(unit, slot):
                self._tape.backward(unit, 0, template, [gradient], accumulator, SideGradients())

        gradient = torch.randn(hidden.shape, generator=self._generator, device=hidden.device, dtype=hidden.dtype)
        forward()
        backward()
        _, up = self._look(forward)
        self._routed[self._skeleton.keys[index]] = [torch.randn_like(logits) for logits in self._tape.routed(unit, 0)]
        _, down = self._look(backward)
        return LayerBytes(kept=up.kept, forward_peak=up.peak, backward_peak=down.peak), (up.seconds, down.seconds)

    def head(self, hidden: Tensor) -> tuple[int, int, int]:
        """Peaks of the training head (its gradient included) and of an evaluation's; what is kept from part to part."""
        first, *others = self._ends[self._skeleton.epilogue_unit.index]
        parameters = self._skeleton.bind(first, self._fill(first))
        sums = Plane(first.layout, FP32_PLANE, self._sums[False])
        sums.buffer.zero_()
        objective, denominator, chunk = CrossEntropy(), float(self._micro_batch.num_targets), self._plan.chunk_tokens
        training, evaluating = (Head(self._skeleton, parameters, plane, chunk) for plane in (sums, None))

        def train() -> None:
            objective.step(training, hidden, self._micro_batch, denominator)

        def evaluate() -> None:
            with torch.no_grad():
                objective.evaluate(evaluating, hidden, self._micro_batch)

        def look() -> Tokens:
            way, block = objective.in_parts(evaluating), block_of(evaluating, first, self._slots[False].buffer)
            tokens = way.begin(evaluating, hidden, self._micro_batch)
            way.look(block, tokens)
            return tokens

        def both_passes() -> Tokens:
            way, tokens = objective.in_parts(evaluating), look()
            way.pull(block_of(training, first, self._slots[False].buffer), tokens, denominator)
            return tokens

        def in_parts() -> None:
            objective.in_parts(evaluating).finish(training, hidden, both_passes())

        whole = not others
        head_peak = self._second(train if whole else in_parts).peak
        evaluation_peak = self._second(evaluate if whole else look).peak
        head_kept = 0 if whole else self._second(both_passes).kept
        return head_peak, evaluation_peak, head_kept

    def _second(self, work: Callable[[], object]) -> _Seen:
        """Of the second run: the first compiles and tunes."""
        work()
        return self._look(work)[1]

    def router_loss(self) -> tuple[int, int]:
        """(gradients that stay, peak) of the load-balancing loss over every layer's logits, which are there already."""
        loss = RouterLoss.of(self._skeleton.balance, [self._micro_batch])
        if loss is None:
            return 0, 0
        logits = [one for key in self._skeleton.keys for one in self._routed[key]]
        loss.step(logits, self._micro_batch, 0)
        _, seen = self._look(lambda: loss.step(logits, self._micro_batch, 0))
        return seen.kept, seen.peak


def _micro_batch(plan: Plan, shape: Shape, vocab_size: int) -> MicroBatch:
    """Random ids, every token trained; where rows are packed, two samples a row."""
    rows, tokens = min(plan.micro_batch_rows, shape.rows_per_step), shape.row_tokens
    ids = torch.randint(0, vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
    positions = None
    if shape.packed:
        half = tokens // 2
        positions = torch.cat([torch.arange(half), torch.arange(tokens - half)]).expand(rows, tokens).contiguous()
    lengths = torch.full((rows,), tokens)
    return MicroBatch(input_ids=ids, labels=ids.clone(), lengths=lengths, position_ids=positions, isolated=shape.isolated)


# ---------------------------------------------------------------- the cache


def cache_file(skeleton: Skeleton, backend: Backend, plan: Plan, shape: Shape) -> Path:
    """Named after everything that could change the bytes."""
    config = skeleton.config.to_dict()
    facts = {
        "layerferry": VERSION,
        "torch": torch.__version__,
        "device": _device(backend),
        "config": {key: config[key] for key in sorted(config) if not key.startswith(("_name", "transformers_version"))},
        "attention": str(getattr(skeleton.config, "_attn_implementation", "")),
        "experts": str(getattr(skeleton.config, "_experts_implementation", "")),
        "frozen": [unit.names[e.name] for unit in skeleton.units for e in unit.layout.entries if not e.trained],
        "rows": plan.micro_batch_rows,
        "shape": dataclasses.asdict(shape),
        "seconds": "of layers",
        "plan": [plan.activation_budget, plan.chunk_tokens, plan.compile, plan.fp32, plan.end_parts, plan.mlp_chunk_tokens],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder() / "activations" / f"{skeleton.config.model_type}-{digest[:20]}.json"


def _device(backend: Backend) -> str:
    describe = getattr(backend, "describe", None)
    return str(describe()) if describe is not None else backend.name


def _read(path: Path) -> Working | None:
    try:
        found = json.loads(path.read_text())
        own = {"layers": _layers(found["layers"]), "layer_s": tuple((up, down) for up, down in found["layer_s"])}
        return Working(**{**found, **own, "others": ()})  # a level is measured alone
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _layers(found: list[dict[str, int]]) -> tuple[LayerBytes, ...]:
    return tuple(LayerBytes(**layer) for layer in found)


def _write(path: Path, working: Working) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(working), indent=1))
    except OSError as error:
        log.warning("%s: cannot be written (%s); activations will be measured again", path, error)
