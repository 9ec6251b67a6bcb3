"""Embedding and head that are never whole on the device: their parts pass by while all micro-batches of a wave wait.

- **Up through the embedding.** The parts come last one first; from each, the rows that the micro-batches look up are gathered.
  With part 0 comes everything else of the unit, so there the family's own prologue runs, and its look-ups are answered.
- **The head** goes over its parts twice (``objectives/head_in_parts.py``): first to last for the loss, last to first for the
  gradients, so that the parts at the turn need not travel again and part 0, with the final norm, is the first and the last.
- **Down through the embedding.** Part 0 first: the prologue's backward gives the gradient of every look-up, and each part in
  turn takes the rows that are its own.

Whole ends are in ``sweep.py``. The rows of the embedding get the same bits either way; the head's sums over the vocabulary have
another order. Checked by ``tests/engine/test_ends_in_parts.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerferry.backends.base import Backend
from layerferry.engine.batch import MicroBatch
from layerferry.engine.drain import Drain
from layerferry.engine.feed import Feed, Slot
from layerferry.engine.gradients import add_gradients, gradients_of
from layerferry.engine.randomness import seed_of
from layerferry.engine.wave import Pass, Wave
from layerferry.errors import PlanError
from layerferry.layout import WEIGHT_PLANE, Plane
from layerferry.models.embedding import LookUp, ServedTap
from layerferry.models.inputs import Inputs
from layerferry.models.skeleton import Skeleton
from layerferry.models.tables import standing_in
from layerferry.objectives.base import DividesHead, Objective
from layerferry.objectives.head import Head
from layerferry.objectives.head_in_parts import Block, HeadInParts, Tokens
from layerferry.plan import Plan
from layerferry.units import Part, Piece, Unit

Numbered = Sequence[tuple[int, MicroBatch]]


@dataclass(frozen=True, slots=True)
class BoundTables:
    """What the prologue ran with."""

    parameters: list[nn.Parameter]  # of part 0, in layout order
    names: dict[int, str]  # id of what stood in for a table -> its name


@dataclass(frozen=True, slots=True)
class EmbeddingParts:
    """The way up and down through a prologue in parts."""

    skeleton: Skeleton
    backend: Backend
    feed: Feed
    drain: Drain
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, skeleton: Skeleton, backend: Backend, feed: Feed, drain: Drain, pieces: Sequence[Piece]) -> EmbeddingParts | None:
        """None where the unit is fed whole."""
        parts = tuple(piece for piece in pieces if isinstance(piece, Part))
        return cls(skeleton, backend, feed, drain, parts) if parts else None

    @property
    def unit(self) -> Unit:
        return self.parts[0].unit

    @property
    def upwards(self) -> tuple[Part, ...]:
        """In the order in which the forward feeds them."""
        return tuple(reversed(self.parts))

    def forward(self, wave: Wave, inputs: Sequence[Inputs]) -> tuple[list[Pass], BoundTables]:
        passes: list[Pass] = []
        rows, trains = self._gather(inputs), self.skeleton.reach.trains_prologue
        with self.feed(self.parts[0]) as slot, wave.tape.record(self.unit, slot), torch.set_grad_enabled(trains):
            parameters, served = self._first(slot, inputs, rows)
            with standing_in(self.skeleton, self.unit, self.backend.device) as tables:
                for (number, micro_batch), given, own in zip(wave.micro_batches, inputs, served, strict=True):
                    self.backend.seed(seed_of(wave.step_seed, self.unit.index, number))
                    tap = ServedTap(parameters, given.input_ids, list(zip(tables, own, strict=True)))
                    hidden, calls = self.skeleton.prologue(given, tap)
                    passes.append(Pass.of(micro_batch, number, hidden, calls, tap.look_ups))
        names = {id(table): name for table, name in zip(tables, self.unit.tables, strict=True)}
        return passes, BoundTables(parameters, names)

    def evaluate(self, micro_batches: Numbered, inputs: Sequence[Inputs]) -> list[Pass]:
        passes: list[Pass] = []
        rows = self._gather(inputs)
        with self.feed(self.parts[0]) as slot:
            _, served = self._first(slot, inputs, rows)
            with standing_in(self.skeleton, self.unit, self.backend.device) as tables:
                for (number, micro_batch), given, own in zip(micro_batches, inputs, served, strict=True):
                    tap = ServedTap((), given.input_ids, list(zip(tables, own, strict=True)))
                    hidden, calls = self.skeleton.prologue(given, tap)
                    passes.append(Pass(micro_batch, number, hidden, calls))
        return passes

    def backward(self, passes: Sequence[Pass], bound: BoundTables, wave: Wave, *, needs_weights: bool) -> None:
        first, *others = self.parts
        found: list[list[tuple[LookUp, Tensor]]] = []
        with self.drain(first, carry=wave.carry) as sums, ExitStack() as weights:
            if needs_weights:
                slot = weights.enter_context(self.feed(first))
                weights.enter_context(wave.tape.resolving(self.unit, slot))
            for run in passes:
                found.append(self._prologue_backward(run, bound, sums))
                self._take_rows(first, sums, bound, found[-1])
        for part in others:
            with self.drain(part, carry=wave.carry) as sums:
                for own in found:
                    self._take_rows(part, sums, bound, own)

    def _gather(self, inputs: Sequence[Inputs]) -> list[list[Tensor]]:
        """Rows [B*T, D] of every table for every micro-batch, from all parts but the first; NaN where there is none yet, and
        stays where an id is beyond the vocabulary."""
        layout, device = self.unit.layout, self.backend.device
        rows = []
        for given in inputs:
            widths = [(layout.by_name[name].shape[1], layout.by_name[name].dtype) for name in self.unit.tables]
            rows.append([torch.full((given.input_ids.numel(), w), torch.nan, dtype=dtype, device=device) for w, dtype in widths])
        for part in self.upwards[:-1]:
            with self.feed(part) as slot:
                self._pick(part, slot, inputs, rows)
        return rows

    def _first(
        self, slot: Slot, inputs: Sequence[Inputs], rows: list[list[Tensor]]
    ) -> tuple[list[nn.Parameter], Iterator[list[Tensor]]]:
        """Part 0 bound, and the rows of each micro-batch, given away one by one."""
        first = self.parts[0]
        self._pick(first, slot, inputs, rows)
        parameters = self.skeleton.bind(first, Plane(first.layout, WEIGHT_PLANE, slot.buffer))
        return parameters, (rows.pop(0) for _ in range(len(rows)))

    def _pick(self, part: Part, slot: Slot, inputs: Sequence[Inputs], rows: list[list[Tensor]]) -> None:
        plane = Plane(part.layout, WEIGHT_PLANE, slot.buffer)
        with torch.no_grad():
            for number, name in enumerate(self.unit.tables):
                if name in part.rows:
                    table = plane.view(part.layout.by_name[name])
                    for given, own in zip(inputs, rows, strict=True):
                        own[number] = _picked(table, given.input_ids.reshape(-1) - part.rows[name].start, own[number])

    def _prologue_backward(self, run: Pass, bound: BoundTables, sums: Plane) -> list[tuple[LookUp, Tensor]]:
        """Adds the gradients of what is no table; gives those of the look-ups."""
        outputs, gradients = run.down_the_prologue()
        leaves = [*(look_up.leaf for look_up in run.look_ups), *bound.parameters]
        found = gradients_of(outputs, leaves, gradients)
        del gradients
        add_gradients(sums, found[len(run.look_ups) :])
        for look_up, own in zip(run.look_ups, found, strict=False):
            if own is not None and id(look_up.table) not in bound.names:
                target = next(e for e, p in zip(sums.layout.entries, bound.parameters, strict=True) if p is look_up.table)
                look_up.add_gradient(own, sums.view(target))
        run.first = run.gradient = None
        return [
            (look_up, own)
            for look_up, own in zip(run.look_ups, found, strict=False)
            if own is not None and id(look_up.table) in bound.names
        ]

    def _take_rows(self, part: Part, sums: Plane, bound: BoundTables, found: list[tuple[LookUp, Tensor]]) -> None:
        for look_up, gradient in found:
            name = bound.names[id(look_up.table)]
            if name in part.rows:
                look_up.add_gradient(gradient, sums.view(part.layout.by_name[name]), part.rows[name].start)


def _picked(table: Tensor, local: Tensor, otherwise: Tensor) -> Tensor:
    """Rows ``local`` [N] of ``table`` [R, D], of ``otherwise`` [N, D] where there is no such row. The host waits for nothing."""
    inside = (local >= 0) & (local < len(table))
    return torch.where(inside[:, None], table.index_select(0, local.clamp(0, len(table) - 1)), otherwise)


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Loss and gradient of a wave over a head in parts."""

    skeleton: Skeleton
    backend: Backend
    feed: Feed
    drain: Drain
    chunk_tokens: int
    parts: tuple[Part, ...]

    @classmethod
    def of(
        cls, skeleton: Skeleton, backend: Backend, feed: Feed, drain: Drain, chunk_tokens: int, pieces: Sequence[Piece]
    ) -> HeadParts | None:
        """None where the unit is fed whole."""
        parts = tuple(piece for piece in pieces if isinstance(piece, Part))
        return cls(skeleton, backend, feed, drain, chunk_tokens, parts) if parts else None

    @property
    def there_and_back(self) -> tuple[Part, ...]:
        """In the order in which a training wave feeds them."""
        return (*self.parts, *reversed(self.parts))

    def train(self, passes: Sequence[Pass], wave: Wave, loss: Tensor, balance: Callable[[Pass], Tensor | None]) -> Tensor:
        """``loss`` plus the wave's; leaves dL/dhidden in each pass. ``balance``: what a router adds to one micro-batch's loss."""
        way, tokens = self._look(passes, wave.objective, wave.step_seed)
        for run, own in zip(passes, tokens, strict=True):
            share, more = way.loss(own) / wave.denominator, balance(run)
            loss = loss + (share if more is None else share + more)
        for part in reversed(self.parts):
            with self.feed(part) as slot, self.drain(part, carry=wave.carry) as sums:
                head = self._head(part, slot, sums)
                for own in tokens:
                    way.pull(block_of(head, part, slot.buffer), own, wave.denominator)
                if part is self.parts[0]:
                    for run, own in zip(passes, tokens, strict=True):
                        self._seed(wave.step_seed, run)
                        run.gradient = way.finish(head, run.hidden, own)
                        run.leave_head()
        return loss

    def evaluate(self, passes: Sequence[Pass], objective: Objective) -> list[Tensor]:
        """Sum of the loss [] over each micro-batch."""
        way, tokens = self._look(passes, objective, None)
        return [way.loss(own) for own in tokens]

    def _look(self, passes: Sequence[Pass], objective: Objective, step_seed: int | None) -> tuple[HeadInParts, list[Tokens]]:
        assert isinstance(objective, DividesHead), "the engine refuses other objectives"
        first, *others = self.parts
        with self.feed(first) as slot:
            head = self._head(first, slot, None)
            way: HeadInParts = objective.in_parts(head)
            tokens = []
            for run in passes:
                self._seed(step_seed, run)
                tokens.append(way.begin(head, run.hidden, run.micro_batch))
            for own in tokens:
                way.look(block_of(head, first, slot.buffer), own)
        for part in others:
            with self.feed(part) as slot:
                head = self._head(part, slot, None)
                for own in tokens:
                    way.look(block_of(head, part, slot.buffer), own)
        return way, tokens

    def _seed(self, step_seed: int | None, run: Pass) -> None:
        """What runs before the head draws the same numbers both times."""
        if step_seed is not None:
            self.backend.seed(seed_of(step_seed, len(self.skeleton.units), run.number))

    def _head(self, part: Part, slot: Slot, sums: Plane | None) -> Head:
        bound = self.skeleton.bind(part, Plane(part.layout, WEIGHT_PLANE, slot.buffer))
        return Head(self.skeleton, bound, sums, self.chunk_tokens)


def block_of(head: Head, piece: Piece, buffer: Tensor) -> Block:
    """The rows of the linear head that a part has in its slot's ``buffer``, with their sums where ``head`` has an accumulator."""
    assert isinstance(piece, Part) and head.skeleton.head is not None
    plane, layout, sums = Plane(piece.layout, WEIGHT_PLANE, buffer), piece.layout.by_name, head.accumulator
    weight, bias = (None if entry is None else layout[entry.name] for entry in head.skeleton.head)
    assert weight is not None
    return Block(
        first=piece.rows[weight.name].start,
        weight=plane.view(weight),
        bias=None if bias is None else plane.view(bias),
        chunk_tokens=head.chunk_tokens,
        weight_sum=None if sums is None or not weight.trained else sums.view(weight),
        bias_sum=None if sums is None or bias is None or not bias.trained else sums.view(bias),
    )


def refuse_undividable(skeleton: Skeleton, plan: Plan) -> None:
    """Raise ``PlanError`` where ``plan`` wants ends in parts that can only be fed whole."""
    if plan.end_parts > 1 and (reason := skeleton.undividable) is not None:
        raise PlanError(f"end_parts: {plan.end_parts}: {skeleton.config.model_type}: {reason}: end_parts: 1 feeds the ends whole")


def refuse_whole_logits(objective: Objective, parts: HeadParts | None) -> None:
    """Raise ``PlanError`` for an objective that needs the whole head where the plan feeds it in parts."""
    if parts is not None and not isinstance(objective, DividesHead):
        raise PlanError(
            f"end_parts: {type(objective).__name__} needs the whole head, which this plan feeds in {len(parts.parts)} parts: "
            "load with end_parts=1"
        )
