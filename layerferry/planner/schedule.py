"""What a step waits for: the engine's program on three lanes, the optimizer's worker and the disk, unit by unit.

``waits`` repeats, in program order, what ``engine/sweep.py``, ``feed.py``, ``drain.py`` and ``deferred.py`` queue, with
seconds instead of bytes: a lane runs its work in order, work begins when its lane is free and its fences are passed, and
whatever the compute lane stands still for is booked on updates or on copies. Two orders matter and are repeated exactly:

- uploads of the first wave are queued by the updates they hang on, the head's last;
- slots go first to the unit that is used next: on the way up the upload of layer i + S waits for layer i, on the way down
  for layer i + S, and between the directions the last S layers stay where they are (Belady's rule for this order of uses).

Kept inputs go down and come back micro-batch by micro-batch, at most ``LEAVING`` and ``LANDINGS`` at a time: over a layer, the
slower of compute and copies sets the pace.
Of layers that turn with the head the first micro-batch waits for the updates, one layer's forward after the other, and in its
backward for gradients that are carried on; the last one's backward is what their gradients travel behind.
Layers whose experts travel in parts are played as if they were whole, in two slots of which nothing stays, and the experts come
twice on the way down: over a layer, the slower of compute and copies sets the pace there too.
Ends in parts share two slots, which ``PartSlots`` fills as the feed does. The disk is a lane of its own (``disk_lane.py``), and a
step is not over before the ring is as full as the next one finds it.

The host is taken to run ahead of the device. Of many waves the third stands for those between it and the last. Checked by
``tests/planner/test_schedule.py`` against closed forms and by measured rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from layerferry.engine.sizes import ARRIVALS, LANDINGS, LAYER_LANDINGS, LEAVING, PART_BUFFERS
from layerferry.planner.disk_lane import DiskLane
from layerferry.planner.part_slots import PartSlots, head_part, prologue_part, uses_of_ends
from layerferry.planner.program import Piece, Program, Waits


def waits(program: Program) -> Waits:
    """Of one step in the steady state."""
    run = _step(_Run(program))
    if program.on_arrival:  # the step before this one leaves updates to be waited for
        left = {unit: max(done - run.compute, 0.0) for unit, done in run.updated.items()}
        worker, disk = (max(lane - run.compute, 0.0) for lane in (run.worker, run.disk.free))
        run = _step(_Run(program, updated=left, worker=worker, disk=disk))
    return run.found


def _step(run: _Run) -> _Run:
    program, last = run.program, len(run.program.waves) - 1
    unplayed_s = 0.0
    for number in sorted({0, 1, 2, last} & set(range(last + 1))):
        before, begin = Waits(run.found.updates, run.found.copies), run.compute
        run.wave(program.waves[number], first=number == 0, last=number == last)
        if number == 2 and last > 3:  # the waves between the third and the last are like the third
            run.found.updates += (last - 3) * (run.found.updates - before.updates)
            run.found.copies += (last - 3) * (run.found.copies - before.copies)
            unplayed_s += (last - 3) * (run.compute - begin)
    disk_s = run.disk.work if program.on_arrival else run.disk.free
    run.found.updates += max(disk_s - (run.compute + unplayed_s), 0.0)
    return run


class _Ring:
    """Buffers that are used in turn."""

    def __init__(self, count: int) -> None:
        self.free = [0.0] * max(count, 1)
        self._turn = 0

    @property
    def next(self) -> int:
        """What ``take`` will give."""
        return (self._turn + 1) % len(self.free)

    def take(self) -> int:
        self._turn = self.next
        return self._turn


class _Run:
    """The lanes' clocks. A unit is known by its index here: layers from 0, parts of the ends below 0."""

    def __init__(
        self, program: Program, *, updated: Mapping[int, float] | None = None, worker: float = 0.0, disk: float = 0.0
    ) -> None:
        """When the step before has ``updated`` its units, and when ``worker`` and ``disk`` are free: on arrival alone."""
        self.program = program
        self.num_slots = max(program.num_slots, 1)
        self.travelling = [index for index, layer in enumerate(program.layers) if not layer.home]
        self.first_turning = len(program.layers) - program.num_turning
        self.below = sum(index < program.num_below for index in self.travelling)
        self.first = [prologue_part(number) for number in range(len(program.prologue))]
        self.head = self.first if program.tied else [head_part(number) for number in range(len(program.head))]
        of_ends = PART_BUFFERS if max(len(self.first), len(self.head)) > 1 else 1
        self.end_slots, self.num_end_slots = PartSlots(of_ends), of_ends
        self.compute, self.upload, self.download = program.home_step_s, 0.0, 0.0
        self.found = Waits()
        self.updated: dict[int, float] = dict(updated or {})
        self.worker = worker
        self.arrivals = {kind: _Ring(count) for kind, count in ARRIVALS.items()}
        self.arriving: list[int] = []
        self.arrived: dict[int, float] = {}
        self.drained: dict[int, float] = {}
        self.landed: dict[int, tuple[float, _Ring, int]] = {}
        self.input_arrival = 0.0
        self.leaving = {True: _Ring(program.num_slabs), False: _Ring(of_ends)}
        self.landing = {True: _Ring(LAYER_LANDINGS), False: _Ring(of_ends)}
        self.expected: deque[int] = deque()
        self.held_back: list[tuple[int, float]] | None = None
        self.disk = self._disk_lane(disk)
        if not program.on_arrival:
            self._begin_updates()

    def piece(self, unit: int) -> Piece:
        if unit >= 0:
            return self.program.layers[unit]
        number, of_head = divmod(-1 - unit, 2)
        return (self.program.head if of_head else self.program.prologue)[number]

    def _trained(self) -> list[list[int]]:
        """The pieces of every unit that is updated, in next-use order."""
        layers = [[index] for index in range(len(self.program.layers))]
        order = [self.first, *layers, *([] if self.program.tied else [self.head])]
        return [pieces for pieces in order if self.piece(pieces[0]).trained]

    def _disk_lane(self, begin: float) -> DiskLane:
        units = [[self.piece(piece) for piece in pieces] for pieces in self._trained() if self.piece(pieces[0]).spill]
        times = [(sum(piece.fetch for piece in own), sum(piece.spill for piece in own)) for own in units]
        return DiskLane(times[::-1] if self.program.on_arrival else times, begin=begin)

    def _begin_updates(self) -> None:
        """One worker, in next-use order; an update waits for the gradient, and the first unit's is the last to come down."""
        trained = self._trained()
        last_down = trained[0][-self.num_end_slots :] if trained else []
        clock = sum(self.piece(piece).send for piece in last_down if not self.piece(piece).home)
        begun: tuple[int, float] | None = None  # an update in stages is finished when the next one has begun
        side = 0.0
        for pieces in (pieces for pieces in trained if not self.piece(pieces[0]).home):
            own = self.piece(pieces[0])
            if own.spill:
                clock = max(clock, self.disk.at_hand())
            clock = begin = clock + sum(self.piece(piece).update for piece in pieces) - own.finish
            clock = self._finish(begun, clock)
            self.updated |= dict.fromkeys(pieces, begin)
            side = max(side, begin) + own.orthogonal + own.trip
            begun = (pieces[0], side) if own.finish else None
            if own.spill and begun is None:
                self.disk.spill(begin)
        self._finish(begun, clock)

    def _finish(self, begun: tuple[int, float] | None, clock: float) -> float:
        if begun is None:
            return clock
        unit, back = begun
        self.updated[unit] = max(clock, back) + self.piece(unit).finish
        if self.piece(unit).spill:
            self.disk.spill(self.updated[unit])
        return self.updated[unit]

    # ---------------------------------------------------------------- one wave

    def wave(self, micro_batches: float, *, first: bool, last: bool) -> None:
        slots, travelling = self.num_slots, self.travelling
        carry = not first and not self.program.resident_gradients
        coming = self._begin_wave(first=first)
        for unit in reversed(self.first):
            self._use_end(unit, micro_batches * self.piece(unit).forward)
        place, turning, one = 0, self.program.layers[self.first_turning :], min(micro_batches, 1.0)
        for index, layer in enumerate(self.program.layers):
            own = micro_batches if index < self.first_turning else one  # the others come when it has been down again
            if layer.home:
                self._forward(layer, own)
                continue
            self._feed(index)
            self.compute += layer.orthogonal if first else 0.0
            self._forward(layer, own)
            if coming:
                self._send_up(coming.popleft(), after=self.compute)
            place += 1
        self._let_go()
        if self.program.in_parts:
            for unit in reversed(travelling[max(self.below, len(travelling) - slots) :]):
                self._send_up(unit, after=self.compute, down=True)
        self._expect_inputs()
        if carry:
            self._expect()
        again = (micro_batches - one) * sum(layer.forward + layer.backward for layer in turning)
        summed = range(self.first_turning, len(self.program.layers)) if carry and micro_batches > 1 else range(0)
        self._head(micro_batches, carry=carry, last=last, again=again, summed=summed)
        for index in reversed(range(self.program.num_below, len(self.program.layers))):
            layer = self.program.layers[index]
            own = micro_batches if index < self.first_turning else one
            if layer.home:
                self._backward(layer, own)
                self._send_down(index, last=last)
                continue
            place -= 1
            if index < self.first_turning:
                self._feed(index)
            self._take_up(index, carry=carry and index not in summed)
            self._backward(layer, own)
            self._send_down(index, last=last)
            if place - slots >= self.below:
                self._send_up(travelling[place - slots], after=self.compute, down=True)
        for unit in self.first:
            if not self.program.tied:
                self._take_up(unit, carry=carry)
            self.compute += micro_batches * self.piece(unit).backward
            self._send_down(unit, last=last)

    def _forward(self, layer: Piece, micro_batches: float) -> None:
        """The last micro-batch begins when all but ``LEAVING`` of the inputs are down."""
        begin = self.compute
        self.compute += micro_batches * layer.forward
        if layer.input_down:
            down = max(self.download, begin) + micro_batches * layer.input_down
            self.download = down
            self._wait(down - LEAVING * layer.input_down + layer.forward)

    def _expect_inputs(self) -> None:
        """The first inputs that come back are on their way before the head begins."""
        one = next((layer.input_up for layer in reversed(self.program.layers) if layer.input_up), 0.0)
        if one:
            self.input_arrival = max(self.upload, self.compute) + one
            self.upload = self.input_arrival + (LANDINGS - 1) * one

    def _backward(self, layer: Piece, micro_batches: float) -> None:
        """An upload begins when a landing is free. The first ones of the next layer are queued before anything that waits for
        this layer's end, such as the next weights."""
        one = layer.input_up
        if one:
            self._wait(self.input_arrival)
            begin, rest = self.compute, max(micro_batches - LANDINGS, 0.0)
            if rest:
                self.upload = max(self.upload, begin + layer.backward) + rest * one
                self._wait(self.upload - (micro_batches - 1) * layer.backward)
        self.compute += micro_batches * layer.backward
        if one:
            self.input_arrival = max(self.upload, self.compute - (LANDINGS - 1) * layer.backward) + one
            self.upload = max(self.input_arrival, self.compute) + (LANDINGS - 1) * one

    def _begin_wave(self, *, first: bool) -> deque[int]:
        """What the slots hold stays from wave to wave; a new step uploads everything, in the order of updates: the head last.
        Returns the layers whose uploads wait for a slot."""
        self.held_back = [] if first else None
        home = {"prologue_home": self.program.prologue[0].home, "head_home": self.piece(self.head[0]).home}
        uses = uses_of_ends(len(self.first), len(self.head), tied=self.program.tied, **home)
        self._begin_uploads(self.end_slots.expect(uses))
        if not first and not self.below and not self.program.in_parts:
            return deque(self.travelling[self.num_slots :])
        coming = self.travelling if first else self.travelling[: self._missed_after_a_wave()]
        for unit in coming[: self.num_slots]:
            self._send_up(unit, after=0.0 if first else self.compute)
        return deque(coming[self.num_slots :])

    def _missed_after_a_wave(self) -> int:
        """Uploads of a later wave's forward where layers lie below the backward (``time.layer_uploads``)."""
        count = len(self.travelling)
        if self.program.in_parts:
            return count
        missed_below = max(count - self.below - self.num_slots, 0)
        return min(count, 2 * max(count - self.num_slots, 0) - missed_below)

    def _begin_uploads(self, begun: list[tuple[int, float]]) -> None:
        for unit, free in begun:
            if self.held_back is not None and unit not in self.first:
                self.held_back.append((unit, free))
            else:
                self._send_up(unit, after=free)

    def _let_go(self) -> None:
        waiting, self.held_back = self.held_back or [], None
        self._begin_uploads(waiting)

    def _use_end(self, unit: int, seconds: float) -> None:
        """One use of an end's slot; the drain of a head's part is booked by the caller."""
        if self.piece(unit).home:
            self.compute += seconds
            return
        self._feed(unit)
        self.compute += seconds
        self._begin_uploads(self.end_slots.used(self.compute))

    def _head(self, micro_batches: float, *, carry: bool, last: bool, again: float, summed: range) -> None:
        """``again``: seconds of all micro-batches but one in the layers that turn with it; of those ``summed`` the first
        micro-batch's backward waits for what is carried on."""
        head = self.program.head
        if len(head) == 1:
            self._take_up(self.head[0], carry=carry)
            seconds = micro_batches * head[0].forward + again
            if summed:
                self._feed(self.head[0])
                self.compute += head[0].forward
                seconds -= head[0].forward
            for index in reversed(summed):
                self._take_up(index, carry=True)
                self.compute += self.program.layers[index].backward
                seconds -= self.program.layers[index].backward
            self._use_end(self.head[0], seconds)
            if not self.program.tied:
                self._send_down(self.head[0], last=last)
            return
        for unit in self.head:
            self._use_end(unit, micro_batches * self.piece(unit).forward)
        for unit in reversed(self.head):
            self._take_up(unit, carry=carry)
            self._use_end(unit, micro_batches * self.piece(unit).backward)
            self._send_down(unit, last=last)

    # ---------------------------------------------------------------- lanes

    def _feed(self, unit: int) -> None:
        if not self.piece(unit).home:
            self._wait(self.arrived[unit], for_update=self.updated.get(unit, 0.0) > self.compute)

    def _wait(self, until: float, *, for_update: bool = False) -> None:
        missing = until - self.compute
        if missing > 0:
            self.compute = until
            if for_update:
                self.found.updates += missing
            else:
                self.found.copies += missing

    def _send_up(self, unit: int, *, after: float, down: bool = False) -> None:
        """``down``: for the backward."""
        piece = self.piece(unit)
        if not piece.home:
            own = piece.upload + (piece.upload_again if down else 0.0)
            self.upload = max(self.upload, after, self.updated.get(unit, 0.0)) + own
            self.arrived[unit] = self.upload

    def _expect(self) -> None:
        """Gradients to be carried on, in the order of the backward; the first is on its way."""
        units = [*reversed(self.head), *reversed(self.travelling), *([] if self.program.tied else self.first)]
        self.expected = deque(unit for unit in units if self.piece(unit).trained and not self.piece(unit).home)
        self._bring_next()

    def _bring_next(self) -> None:
        if self.expected:
            unit = self.expected.popleft()
            ring = self.landing[unit >= 0]
            slab = ring.take()
            self.upload = max(self.upload, ring.free[slab], self.drained[unit]) + self.piece(unit).bring
            self.landed[unit] = (self.upload, ring, slab)

    def _take_up(self, unit: int, *, carry: bool) -> None:
        if carry and self.piece(unit).trained and not self.piece(unit).home:
            arrival, ring, slab = self.landed.pop(unit)
            self._wait(arrival)
            ring.free[slab] = self.compute
            self._bring_next()

    def _send_down(self, unit: int, *, last: bool) -> None:
        piece = self.piece(unit)
        if not piece.trained or (not last and (piece.home or self.program.resident_gradients)):
            return
        if piece.home:
            self.compute += piece.drain
            return
        ring = self.leaving[unit >= 0]
        slab = ring.take()
        self._wait(ring.free[slab])
        self.compute += piece.drain
        if self.program.on_arrival and not self.arriving:
            buffers = self.arrivals[unit >= 0]
            self._wait(buffers.free[buffers.next], for_update=True)
        self.download = max(self.download, self.compute) + piece.send
        self.drained[unit] = ring.free[slab] = self.download
        if self.program.on_arrival:
            self._arrive(unit)

    def _arrive(self, unit: int) -> None:
        """The worker takes a unit up when its last part has come."""
        self.arriving.append(unit)
        whole = next((pieces for pieces in (self.first, self.head) if unit in pieces), [unit])
        if len(self.arriving) == len(whole):
            own = [self.piece(part) for part in whole]
            # nothing comes between the halves of an update in stages
            took = sum(part.update + part.orthogonal + part.trip for part in own)
            self.worker = max(self.worker, self.download, self.disk.at_hand() if own[0].spill else 0.0) + took
            if own[0].spill:
                self.disk.spill(self.worker)
            self.updated |= dict.fromkeys(whole, self.worker)
            buffers = self.arrivals[unit >= 0]
            buffers.free[buffers.take()] = self.worker
            self.arriving.clear()
