"""One wave: all its micro-batches go up through the units together, and their gradients come down.

This file is the schedule. Weights arrive (``feed``), a layer runs on a micro-batch (``one_layer``), gradients leave (``drain``);
there is no stream, no event and no counter of slots here. Every unit is fed once on the way up and once on the way down, whatever
the number of micro-batches, and each gradient is summed in fp32 on the device before it travels; ends, and layers of many
experts, may be fed in parts instead. The last layers may turn with the head: they are held, and each micro-batch goes up and down
through all of them before the next one comes, so that what they keep is there for one micro-batch at a time, and nothing is fed
twice. The way down ends at the lowest unit that is trained: layers below it leave no graph, and are not fed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from layerferry.backends.base import Backend
from layerferry.engine.batch import MicroBatch
from layerferry.engine.drain import Drain
from layerferry.engine.ends_in_parts import BoundTables, EmbeddingParts, HeadParts
from layerferry.engine.experts_in_parts import ExpertParts
from layerferry.engine.feed import Feed, Slot
from layerferry.engine.gradients import add_gradients, gradients_of
from layerferry.engine.one_layer import OneLayer
from layerferry.engine.randomness import seed_of
from layerferry.engine.router_loss import RouterLoss
from layerferry.engine.tape import Tape
from layerferry.engine.turn import Held
from layerferry.engine.wave import Pass, Wave
from layerferry.layout import WEIGHT_PLANE, Plane
from layerferry.models.embedding import EmbeddingTap
from layerferry.models.inputs import Inputs
from layerferry.models.skeleton import Skeleton
from layerferry.models.varlen import boundaries
from layerferry.objectives.base import Objective
from layerferry.objectives.head import Head
from layerferry.units import Piece, Unit


@dataclass(frozen=True, slots=True)
class Sweep:
    """The two directions of a wave over the engine's parts."""

    skeleton: Skeleton
    backend: Backend
    feed: Feed
    drain: Drain
    layer: OneLayer
    experts: ExpertParts
    """The layers that are not fed whole."""
    first_turning: int
    """Index of the first layer that turns with the head; the number of layers: none does."""
    chunk_tokens: int
    embedding_parts: EmbeddingParts | None
    """Where the prologue is not fed whole. So too the head."""
    head_parts: HeadParts | None

    # ---------------------------------------------------------------- a training wave

    def train(self, wave: Wave, loss: Tensor) -> Tensor:
        """Forward and backward; ``loss`` [] fp32 @device of earlier waves plus this one's share, micro-batch by micro-batch,
        so that the sum does not depend on the waves."""
        skeleton, tape = self.skeleton, wave.tape
        layers, below = skeleton.layer_units, skeleton.reach.num_below
        self.layer.kept.begin([number for number, _ in wave.micro_batches])
        embedding, head = self.embedding_parts, self.head_parts
        first = [skeleton.prologue_unit] if embedding is None else embedding.upwards
        turn = [skeleton.epilogue_unit] if head is None else head.there_and_back
        numbered = list(enumerate(layers))
        upwards, turning = numbered[: self.first_turning], numbered[self.first_turning :]
        back = self.experts.downwards(reversed(upwards[below:]))
        self.feed.expect([*first, *self.experts.upwards(numbered), *turn, *back])
        self._set_mode(training=True)
        passes, bound = self._prologue(wave)
        needs_prologue = tape.num_handles.get(skeleton.prologue_unit.index, 0) > 0
        if needs_prologue:
            self.feed.expect([first[-1]])
        for index, unit in upwards:
            self._layer_forward(unit, index, passes, wave)
        self.layer.kept.expect()
        tied = skeleton.epilogue_unit is skeleton.prologue_unit
        if wave.carry:
            self.drain.expect(self._downwards(tied=tied))
        with ExitStack() as whole_backward:
            # TRAP: a tied unit's gradient has two shares; its norm is that of the sum (tests/engine/test_invariance.py)
            ends = whole_backward.enter_context(self.drain(skeleton.epilogue_unit, carry=wave.carry)) if tied else None
            loss = self._turn(turning, passes, wave, ends, loss)
            for index, unit in reversed(upwards[below:]):
                self._layer_backward(unit, index, passes, wave)
            if not skeleton.reach.trains_prologue:
                return loss
            if embedding is not None:
                assert isinstance(bound, BoundTables)
                embedding.backward(passes, bound, wave, needs_weights=needs_prologue)
            else:
                assert isinstance(bound, list)
                with self._or_drain(ends, skeleton.prologue_unit, carry=wave.carry) as accumulator:
                    self._prologue_backward(passes, bound, tape, accumulator, needs_prologue)
        return loss

    def _downwards(self, *, tied: bool) -> list[Piece]:
        """What is drained, in the order of the backward."""
        embedding, head = self.embedding_parts, self.head_parts
        last: Sequence[Piece] = [self.skeleton.prologue_unit] if embedding is None else embedding.parts
        first: Sequence[Piece] = [self.skeleton.epilogue_unit] if head is None else head.parts
        layers = [*enumerate(self.skeleton.layer_units)][self.skeleton.reach.num_below :]
        return [*reversed(first), *self.experts.drained(reversed(layers)), *([] if tied else last)]

    def _prologue(self, wave: Wave) -> tuple[list[Pass], list[torch.nn.Parameter] | BoundTables]:
        unit = self.skeleton.prologue_unit
        if self.embedding_parts is not None:
            return self.embedding_parts.forward(wave, [self._inputs(micro_batch) for _, micro_batch in wave.micro_batches])
        passes, trains = [], self.skeleton.reach.trains_prologue
        with self.feed(unit) as slot, wave.tape.record(unit, slot), torch.set_grad_enabled(trains):
            parameters = self._bind(unit, slot)
            for number, micro_batch in wave.micro_batches:
                self.backend.seed(seed_of(wave.step_seed, unit.index, number))
                tap = EmbeddingTap(parameters)
                hidden, calls = self.skeleton.prologue(self._inputs(micro_batch), tap)
                passes.append(Pass.of(micro_batch, number, hidden, calls, tap.look_ups))
        return passes, parameters

    def _layer_forward(self, unit: Unit, index: int, passes: Sequence[Pass], wave: Wave) -> None:
        if index in self.experts.parts:
            self.experts.forward(index, passes, wave)
            return
        with self.feed(unit) as slot:
            layer = self.layer.fed(index, slot)
            for run in passes:
                self.layer.up(layer, run, wave)

    def _turn(
        self, turning: Sequence[tuple[int, Unit]], passes: Sequence[Pass], wave: Wave, accumulator: Plane | None, loss: Tensor
    ) -> Tensor:
        """Head and loss, and the layers that turn with it, which the first micro-batch finds one by one as their weights arrive,
        and the last one leaves one by one, so that their gradients travel behind it. ``accumulator``: the head's, if it is there
        already. Returns ``loss`` [] with this wave's share."""
        if self.head_parts is not None:
            return self.head_parts.train(passes, wave, loss, lambda run: self._balance(run, wave))
        lanes = (self.feed, self.drain)
        with ExitStack() as failing:
            held = [Held(unit, *lanes, partial(self.layer.fed, index), carry=wave.carry) for index, unit in turning]
            layers = [failing.enter_context(one) for one in held]
            last_unit = self.skeleton.epilogue_unit

            def bound(slot: Slot) -> Head:
                return Head(self.skeleton, self._bind(last_unit, slot), head.sums, self.chunk_tokens)

            head = failing.enter_context(Held(last_unit, *lanes, bound, carry=wave.carry, sums=accumulator))
            for run in passes:
                last = run is passes[-1]
                for held_layer in layers:
                    with held_layer.used() as layer:
                        self.layer.up(layer, run, wave)
                with head.used() as bound_head:
                    loss = loss + self._at_head(bound_head, run, wave)
                if last:
                    head.let_go()
                for held_layer in reversed(layers):
                    with held_layer.used() as layer:
                        self.layer.down(layer, run, held_layer.sums, wave)
                    if last:
                        held_layer.let_go()
        return loss

    def _at_head(self, head: Head, run: Pass, wave: Wave) -> Tensor:
        """One micro-batch's share of the loss [] fp32 @device; its gradient is in ``run`` then."""
        self.backend.seed(seed_of(wave.step_seed, len(self.skeleton.units), run.number))
        share, run.gradient = wave.objective.step(head, run.hidden, run.micro_batch, wave.denominator)
        run.leave_head()
        balance = self._balance(run, wave)
        return share if balance is None else share + balance

    def _balance(self, run: Pass, wave: Wave) -> Tensor | None:
        """The load-balancing loss of one micro-batch [], where there is one; its gradients wait in ``run`` for the layers'
        backward."""
        router_loss = wave.router_loss
        if router_loss is None:
            return None
        routed = {unit.index: wave.tape.routed(unit, run.number) for unit in self.skeleton.layer_units}
        logits = [one for of_layer in routed.values() for one in of_layer]
        loss, gradients = router_loss.step(logits, run.micro_batch, run.number)
        waiting = iter(gradients)
        run.router_gradients = {index: [next(waiting) for _ in of_layer] for index, of_layer in routed.items()}
        return loss

    def _layer_backward(self, unit: Unit, index: int, passes: Sequence[Pass], wave: Wave) -> None:
        if index in self.experts.parts:
            self.experts.backward(index, passes, wave)
            return
        with self.feed(unit) as slot, self.drain(unit, carry=wave.carry) as sums:
            layer = self.layer.fed(index, slot)
            for run in passes:
                self.layer.down(layer, run, sums, wave)

    def _prologue_backward(
        self,
        passes: Sequence[Pass],
        parameters: Sequence[torch.nn.Parameter],
        tape: Tape,
        accumulator: Plane,
        needs_weights: bool,
    ) -> None:
        unit = self.skeleton.prologue_unit
        with ExitStack() as weights:
            if needs_weights:
                slot = weights.enter_context(self.feed(unit))
                weights.enter_context(tape.resolving(unit, slot))
            for run in passes:
                outputs, gradients = run.down_the_prologue()
                leaves = [*(look_up.leaf for look_up in run.look_ups), *parameters]
                found = gradients_of(outputs, leaves, gradients)
                for look_up, own in zip(run.look_ups, found, strict=False):
                    if own is not None:
                        target = next(e for e, p in zip(unit.layout.entries, parameters, strict=True) if p is look_up.table)
                        look_up.add_gradient(own, accumulator.view(target))
                add_gradients(accumulator, found[len(run.look_ups) :])
                run.first = None

    # ---------------------------------------------------------------- an evaluation wave

    def evaluate(
        self,
        micro_batches: Sequence[tuple[int, MicroBatch]],
        objective: Objective,
        denominator: float,
        *,
        router_loss: RouterLoss | None = None,
    ) -> Tensor:
        """These micro-batches' share of the loss [] fp32 @device; memory grows with their number by hidden states only."""
        skeleton = self.skeleton
        first = [skeleton.prologue_unit] if self.embedding_parts is None else self.embedding_parts.upwards
        last = [skeleton.epilogue_unit] if self.head_parts is None else self.head_parts.parts
        numbered = list(enumerate(skeleton.layer_units))
        self.feed.expect([*first, *self.experts.upwards(numbered), *last])
        self._set_mode(training=False)
        total = torch.zeros((), device=self.backend.device)
        with torch.no_grad():
            passes = self._embedded(micro_batches)
            for index, unit in numbered:
                if index in self.experts.parts:
                    self.experts.evaluate(index, passes)
                    continue
                with self.feed(unit) as slot:
                    layer = self.layer.fed(index, slot)
                    for run in passes:
                        self.layer.evaluate(layer, run)
            for run, share in zip(passes, self._losses(passes, objective), strict=True):
                total = total + share / denominator
                if router_loss is not None:
                    total = total + router_loss.evaluate(run.routed, run.micro_batch, run.number)
        return total

    def _embedded(self, micro_batches: Sequence[tuple[int, MicroBatch]]) -> list[Pass]:
        inputs = [self._inputs(micro_batch) for _, micro_batch in micro_batches]
        if self.embedding_parts is not None:
            return self.embedding_parts.evaluate(micro_batches, inputs)
        unit, passes = self.skeleton.prologue_unit, []
        with self.feed(unit) as slot:
            self._bind(unit, slot)
            for (number, micro_batch), given in zip(micro_batches, inputs, strict=True):
                hidden, calls = self.skeleton.prologue(given, EmbeddingTap(()))
                passes.append(Pass(micro_batch, number, hidden, calls))
        return passes

    def _losses(self, passes: Sequence[Pass], objective: Objective) -> list[Tensor]:
        """Sum of the loss [] over each micro-batch."""
        if self.head_parts is not None:
            return self.head_parts.evaluate(passes, objective)
        unit = self.skeleton.epilogue_unit
        with self.feed(unit) as slot:
            head = Head(self.skeleton, self._bind(unit, slot), None, self.chunk_tokens)
            return [objective.evaluate(head, run.hidden, run.micro_batch) for run in passes]

    # ---------------------------------------------------------------- helpers

    def _set_mode(self, *, training: bool) -> None:
        self.layer.templates.train(training)
        # TRAP: the ends have dropout of their own (tests/conformance/test_not_vacuous.py)
        if self.skeleton.model.training != training:
            self.skeleton.model.train(training)

    @contextmanager
    def _or_drain(self, accumulator: Plane | None, unit: Unit, *, carry: bool) -> Iterator[Plane]:
        if accumulator is not None:
            yield accumulator
        else:
            with self.drain(unit, carry=carry) as own:
                yield own

    def _bind(self, unit: Unit, slot: Slot) -> list[torch.nn.Parameter]:
        return self.skeleton.bind(unit, Plane(unit.layout, WEIGHT_PLANE, slot.buffer))

    def _inputs(self, micro_batch: MicroBatch) -> Inputs:
        """@device. Padding is on the right, where no causal model looks, so there is no padding mask; packed rows that may see
        each other need a mask of ones, or their restarting positions would be taken for a wish to be isolated."""
        put: Callable[[Tensor], Tensor] = self.backend.to_device
        ids = put(micro_batch.input_ids)
        positions = None if micro_batch.position_ids is None else put(micro_batch.position_ids)
        if positions is None:
            return Inputs(ids)
        if not micro_batch.isolated:
            return Inputs(ids, positions, torch.ones_like(ids))
        if self.skeleton.has_varlen and micro_batch.position_ids is not None:
            return Inputs(ids, positions, torch.ones_like(ids), put(boundaries(micro_batch.position_ids)))
        return Inputs(ids, positions)
