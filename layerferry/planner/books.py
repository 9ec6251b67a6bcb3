"""Bytes and lower bounds of seconds for thousands of choices: every part is counted once and remembered.

The parts are those of the byte table (``memory.py``), so that what fits here fits there; a test holds the two equal. Units
at home are always the first ones of the model, so what they weigh is a running sum. Checked by
``tests/planner/test_search.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

from layerferry.engine.sizes import InputSizes, device_sizes, input_sizes
from layerferry.layout import GRAD
from layerferry.plan import Plan
from layerferry.planner import compute
from layerferry.planner.choice import Choice
from layerferry.planner.disk_books import DiskBooks
from layerferry.planner.estimate import estimate
from layerferry.planner.held import DEVICE, HOST, arrival_bytes
from layerferry.planner.memory import InLayers, buffers, fullest, in_layers, plan_specs
from layerferry.planner.problem import ESTIMATE_MARGIN, Problem, places
from layerferry.planner.time import layer_uploads, waves_of
from layerferry.planner.weights import Weights
from layerferry.planner.working import Working
from layerferry.units import Kind

WASTEFUL = 2.0
"""Times the bytes of the other way, beyond which one way for layers to keep more is not looked at."""


class Books:
    """Of one question. All fields are written here only."""

    def __init__(self, question: Problem) -> None:
        self._question = question
        self._specs = {carry: plan_specs(question.specs, Plan(carry_fp32=carry)) for carry in (False, True)}
        self._weights = {carry: Weights(question, specs) for carry, specs in self._specs.items()}
        self._units = len(question.model.units)
        pinned = question.pins.device_units
        self._pinned_home = None if pinned is None else min(pinned, self._units)
        there = places(0, 0, question.machine)
        self._one_memory, self._host = question.machine.one_memory, there[HOST][1]
        self._device = there[DEVICE][1] if DEVICE in there else None
        self._working: dict[Hashable, Working] = {}
        self._activations: dict[Hashable, int] = {}
        self._fixed: dict[Hashable, tuple[int, int]] = {}
        self._paces: dict[Hashable, tuple[float, float]] = {}
        self._inputs: dict[Hashable, InputSizes] = {}
        self._in_layers: dict[Hashable, InLayers] = {}
        self._least_short: dict[Hashable, int] = {}
        self._last_plain: Choice | None = None
        self._plain_at_home: tuple[Choice, int]
        self._disk = DiskBooks(question)
        self._kept: dict[int, float] = {}
        sizes = device_sizes(question.model.units, Plan(), question.specs)[Kind.LAYERS]
        self._turning_bytes = {resident: sizes.slot_bytes + (0 if resident else sizes.sums) for resident in (False, True)}
        """By whether sums are resident anyway: slot and sum of the largest layer."""
        self._first_wave: dict[Hashable, tuple[float, int]] = {}

    def _fewest_at_home(self, choice: Choice) -> int:
        """Units that must live @device because the host has no room for all, or that the user has pinned there."""
        if self._pinned_home is not None:
            return self._pinned_home
        if self._one_memory:
            return 0
        planes, most = self._weights[choice.carry_fp32].planes, self._most_at_home(choice)
        needed = planes[-1] + self._inputs_of(choice).host_bytes - self._host

        def enough(home: int) -> bool:
            return planes[home] + self._disk.reach(home)[-1] >= needed + self._arrivals_of(choice, home)

        least = 0 if self._disk.is_there else bisect_left(planes, needed)  # of planes alone
        return next(filter(enough, range(least, most)), most)

    def _most_at_home(self, choice: Choice) -> int:
        """Where experts travel in parts no layer of experts is at home, for there it would be whole."""
        most = self._question.model.most_beside_parts if choice.expert_parts > 1 else self._units
        return min(self._disk.most_home, most)

    # ---------------------------------------------------------------- bytes

    def furnished(self, choice: Choice) -> tuple[Choice, int]:
        """``choice`` with as many units at home, and as many layers that keep more or turn, as fit, and the bytes that are short
        (0: it fits)."""
        pins = self._question.pins
        pinned = pins.richer_layers is not None or pins.turn_layers is not None
        found, short = (choice, 0) if choice.before_home and pinned else self._plain(choice)
        if short:
            return found, short  # layers that keep more, or turn, need no fewer bytes
        if choice.before_home:
            found, short = self._at_home(self._favoured(self._with(choice, self._fewest_at_home(choice))))
        if choice.mlp_chunk_tokens and not short and "kept_attention" not in pins:
            found = self._attention_kept(found)
        found = found if short or choice.before_home else self._favoured(found)
        return (self._with(found, found.home) if found.on_disk else found), short

    def _plain(self, choice: Choice) -> tuple[Choice, int]:
        """``choice`` with units at home alone; remembered for the next one, which often differs in what layers may keep."""
        plain = choice.plain
        if plain != self._last_plain:
            self._last_plain, self._plain_at_home = plain, self._at_home(plain)
        found, short = self._plain_at_home
        if short or not choice.may_favour:
            return found, short
        return found._replace(richer_budget=choice.richer_budget, turns=choice.turns, before_home=choice.before_home), short

    def _favoured(self, choice: Choice) -> Choice:
        """``choice`` with as many layers as fit that keep ``richer_budget``, or that turn; what is short already stays so."""
        if not choice.may_favour:
            return choice
        pins, model = self._question.pins, self._question.model
        favour, pinned = (self.turning, pins.turn_layers) if choice.turns else (self._keeping, pins.richer_layers)
        there = model.num_layers - (model.num_below if choice.turns else 0)
        if pinned is not None:
            return favour(choice, min(pinned, there))
        most = min(there, model.num_layers - (choice.host_inputs if "host_inputs" in pins else 0))
        if choice.turns:
            most = min(most, choice.num_slots - 1 if "num_slots" in pins else most)
        return favour(choice, _most(lambda layers: not self.short(favour(choice, layers)), 0, most))

    def _attention_kept(self, choice: Choice) -> Choice:
        """``choice`` with as many layers whose attention is not computed twice as fit; units at home make room for them."""
        if not self._question.model.attention_bytes:
            return choice
        least = self._with(choice, self._fewest_at_home(choice))
        kept = _most(lambda layers: not self.short(least._replace(kept_attention=layers)), 0, self._question.model.num_layers)
        return self._at_home(least._replace(kept_attention=kept))[0]

    def is_wasteful(self, choice: Choice) -> bool:
        """Whether a layer that keeps more takes more than twice the bytes that it would take the other way: turning, a slot, a
        sum and what one micro-batch keeps; else what all micro-batches of the wave keep."""
        kept = self._kept_by_layer(choice.micro_batch_rows)
        turning, keeping = kept + self._turning_bytes[choice.resident_gradients], max(self._cut(choice)[0], 1.0) * kept
        return turning > WASTEFUL * keeping if choice.turns else keeping > WASTEFUL * turning

    def _kept_by_layer(self, rows: int) -> float:
        """Bytes that one micro-batch keeps in the fullest layer where that costs no time."""
        if rows not in self._kept:
            plan = Plan(compile=self._question.compiles, micro_batch_rows=rows)
            estimated = estimate(self._question.model, replace(plan, activation_budget=plan.free_budget), self._question.shape)
            self._kept[rows] = max(layer.kept for layer in estimated.layers)
        return self._kept[rows]

    def _keeping(self, choice: Choice, richer: int) -> Choice:
        """``choice`` with ``richer`` layers that keep more, whose inputs stay @device."""
        inputs = min(choice.host_inputs, self._question.model.num_layers - richer)
        return choice._replace(richer_layers=richer, host_inputs=inputs)

    def turning(self, choice: Choice, turn: int) -> Choice:
        """``choice`` with ``turn`` layers that turn, each with a slot besides, and whose inputs stay @device."""
        all_there = choice.turn_layers > 0 and choice.num_slots == self._travelling(choice.home)
        fixed = all_there or "num_slots" in self._question.pins
        slots = choice.num_slots if fixed else choice.num_slots - choice.turn_layers + turn
        inputs = min(choice.host_inputs, self._question.model.num_layers - turn)
        return self._with(choice._replace(turn_layers=turn, num_slots=slots, host_inputs=inputs), choice.home)

    def filled(self, choice: Choice) -> Choice | None:
        """``choice`` with the fewest inputs @host that let it fit; None where no number does."""
        count = self._question.model.num_layers

        def fits(on_device: int) -> bool:
            one = choice._replace(host_inputs=count - on_device)
            return not self.short(self._with(one, self._fewest_at_home(one)))

        found, short = self.furnished(choice._replace(host_inputs=count - _most(fits, 0, count - 1)))
        if not short:
            return found
        between = (self.furnished(choice._replace(host_inputs=inputs)) for inputs in self._fewest_inputs(choice))
        return next((found for found, short in between if not short), None)

    def _fewest_inputs(self, choice: Choice) -> Iterator[int]:
        """Of numbers of units at home that leave the host room for some inputs and not for all: the fewest that the device can
        do with. More would send units home, which takes more of the device than inputs do."""
        count = self._question.model.num_layers
        none, every = (self._fewest_at_home(choice._replace(host_inputs=inputs)) for inputs in (0, count))
        for home in range(none, every):

            def has_room(on_device: int, home: int = home) -> bool:
                needed = self.device(self._in_memory(choice._replace(host_inputs=count - on_device), home))
                return self._device is None or needed <= self._device

            if not has_room(0):
                return
            yield count - _most(has_room, 0, count - 1)

    def _at_home(self, choice: Choice) -> tuple[Choice, int]:
        fewest, most = self._fewest_at_home(choice), self._most_at_home(choice)
        beside = self._beside_planes(choice, whole=fewest == self._units)
        short = self._short_with(choice, fewest, beside)
        if self._question.machine.is_cpu or self._pinned_home is not None:
            return self._with(choice, fewest), short
        if fewest < self._units == most and not self._short_with(choice, most, self._beside_planes(choice, whole=True)):
            return self._with(choice, most), 0  # buffers of the layers are gone: not in line with the rest
        if not short:
            most = min(most, self._units - 1)
            fewest = _most(lambda home: not self._short_with(choice, home, beside), fewest, most)
        return self._with(choice, fewest), short

    def _with(self, choice: Choice, home: int) -> Choice:
        """``choice`` with ``home`` units at home; no more slots than layers travel, and no parts where no end does."""
        plain = self._in_memory(choice, home)
        return plain._replace(on_disk=self._on_disk(home, *self._needs(choice, home))) if self._disk.is_there else plain

    def _travelling(self, home: int) -> int:
        """Layers that are not among the first ``home`` units."""
        layers = self._weights[False].layers
        return layers[-1] - layers[home]

    def _in_memory(self, choice: Choice, home: int) -> Choice:
        travelling = self._travelling(home)
        slots = choice.num_slots if "num_slots" in self._question.pins else max(min(choice.num_slots, travelling), 1)
        parts = choice.end_parts if "end_parts" in self._question.pins or home < self._units else 1
        experts = choice.expert_parts if "expert_parts" in self._question.pins or travelling else 1
        return choice._replace(home=home, num_slots=slots, end_parts=parts, expert_parts=experts, on_disk=())

    def _on_disk(self, home: int, host: int, device: int) -> tuple[int, ...]:
        """What must go to the disk where ``host`` and ``device`` bytes are needed without one."""
        return self._disk.fewest(home, host + (device if self._one_memory else 0) - self._host)

    def short(self, choice: Choice) -> int:
        """Bytes that are missing, both places together."""
        return self._missing(*self._needs(choice, choice.home), choice.on_disk)

    def _short_with(self, choice: Choice, home: int, beside: tuple[int, int]) -> int:
        """The same of ``choice`` with ``home`` units at home, and as few @disk as that needs."""
        host, device = self._planes_and_buffers(choice, home)
        host, device = host + beside[0], device + beside[1]
        return self._missing(host, device, self._on_disk(home, host, device) if self._disk.is_there else ())

    def least_short(self, choice: Choice, *, may_fill: bool = False) -> int:
        """Bytes that are missing, wherever units live and in whatever slots they land. ``may_fill``: and with any number of
        inputs @host, so of the device alone, where none or all take fewest."""
        key = (*choice.cut, *choice.computed, choice.end_parts, choice.expert_parts, choice.host_inputs, may_fill)
        if key not in self._least_short:
            several = (choice, choice._replace(host_inputs=self._question.model.num_layers)) if may_fill else (choice,)
            beside = [self._beside_planes(one, whole=whole) for one in several for whole in (False, True)]
            self._least_short[key] = min(self._missing(0 if may_fill else host, device, ()) for host, device in beside)
        return self._least_short[key]

    def _missing(self, host: int, device: int, disk: tuple[int, ...]) -> int:
        """Of bytes that are needed with nothing @disk, and what is there. As ``problem.places`` has it."""
        over_host = host + (device if self._one_memory else 0) - self._host
        over_device = device - self._device if self._device is not None else 0
        over_disk = 0
        if disk:
            over_host -= self._disk.saved(disk)
            over_disk = self._disk.bytes(disk) - self._question.machine.disk_available
        return max(over_host, 0) + max(over_device, 0) + max(over_disk, 0)

    def host(self, choice: Choice) -> int:
        return self._needs(choice, choice.home)[0] - self._disk.saved(choice.on_disk)

    def device(self, choice: Choice) -> int:
        """With the margin for estimates."""
        return self._needs(choice, choice.home)[1]

    def _needs(self, choice: Choice, home: int) -> tuple[int, int]:
        """(bytes @host, bytes @device) of ``choice`` with ``home`` units at home, and nothing @disk."""
        host, device = self._planes_and_buffers(choice, home)
        host_beside, device_beside = self._beside_planes(choice, whole=home == self._units)
        return host + host_beside, device + device_beside

    def _beside_planes(self, choice: Choice, *, whole: bool) -> tuple[int, int]:
        """Of inputs and activations. ``whole``: every unit is at home."""
        inputs = self._inputs_of(choice)
        return inputs.host_bytes, inputs.device_bytes + self._activations_of(choice, whole=whole)

    def _planes_and_buffers(self, choice: Choice, home: int) -> tuple[int, int]:
        sums = (choice.num_waves > 1, choice.resident_gradients, choice.carry_fp32)
        turning = (choice.turn_layers, choice.host_inputs if choice.turn_layers else 0)
        key = (home, choice.num_slots, choice.num_slabs, choice.end_parts, choice.expert_parts, *sums, *turning)
        if key not in self._fixed:
            weights, own = self._weights[choice.carry_fp32], self._in_memory(choice, home)
            table = buffers(self._question.model, self._specs[choice.carry_fp32], own.on(Plan()))
            host = weights.planes[-1] - weights.planes[home] + self._arrivals_of(choice, home)
            self._fixed[key] = (host, weights.at_home[home] + sum(item.num_bytes for item in table))
        return self._fixed[key]

    def _arrivals_of(self, choice: Choice, home: int) -> int:
        if not self._question.on_arrival:
            return 0
        return arrival_bytes(self._question.model, self._specs[choice.carry_fp32][GRAD], tuple(range(home)))

    def _inputs_of(self, choice: Choice) -> InputSizes:
        key = (*choice.cut, choice.host_inputs)
        if key not in self._inputs:
            shape = self._question.shape
            plan = choice.on(Plan(row_tokens=shape.row_tokens, rows_per_step=shape.rows_per_step))
            model = self._question.model
            self._inputs[key] = input_sizes(plan, model.boundary, model.num_layers, model.num_below)
        return self._inputs[key]

    def _activations_of(self, choice: Choice, *, whole: bool) -> int:
        several = choice.richer_budget if choice.richer_layers else 0.0
        own = self._in_memory(choice, self._units) if whole else choice  # at home ends and layers are whole
        again = choice.host_inputs > 0 or choice.mlp_chunk_tokens > 0 or choice.turn_layers > 0 or own.expert_parts > 1
        of_micro_batch = (choice.micro_batch_rows, *choice.computed, several, own.end_parts, own.expert_parts, again, whole)
        key = (*of_micro_batch, *choice.cut, choice.richer_layers, *choice.in_layers)
        if key not in self._activations:
            question = self._question
            plan = own._replace(home=self._units if whole else 0).on(Plan(compile=question.compiles, fp32=question.fp32))
            if of_micro_batch not in self._working:
                self._working[of_micro_batch] = question.working(plan)
            working = self._working[of_micro_batch]
            lines = fullest(question.model, plan, question.shape, working, self._in_layers_of(plan, working))
            total = sum(num_bytes for _, num_bytes in lines)
            self._activations[key] = total if working.measured else total + int(ESTIMATE_MARGIN * total)
        return self._activations[key]

    def _in_layers_of(self, plan: Plan, working: Working) -> InLayers:
        """The same for all ways of cutting the head and its logits."""
        of_layers = (working.layers, working.others, working.router_gradients, plan.mlp_chunk_tokens, plan.expert_parts)
        kept = (plan.activation_budget, plan.richer_layers, plan.richer_budget, plan.host_inputs, plan.kept_attention)
        key = (plan.micro_batch_rows, plan.num_waves, plan.first_wave, plan.turn_layers, *kept, *of_layers)
        if key not in self._in_layers:
            self._in_layers[key] = in_layers(self._question.model, plan, self._question.shape, working)
        return self._in_layers[key]

    # ---------------------------------------------------------------- seconds

    def least_seconds(self, choice: Choice) -> float:
        """What the choice cannot do without: the compute, and the updates that the first wave's forward is too short for, or
        a lane that has more to do than both."""
        machine, weights = self._question.machine, self._weights[choice.carry_fp32]
        work, forward = self._compute_of(choice)
        micro_batches, rounds = self._cut(choice)
        away = weights.trained[-1] - weights.trained[choice.home]
        optimizer = weights.updates[-1] - weights.updates[choice.home]
        grad = weights.grad[-1] - weights.grad[choice.home]
        carried = 0 if choice.resident_gradients else rounds - 1
        layers = weights.layers[-1] - weights.layers[choice.home]
        below = max(self._question.model.num_below - weights.layers[choice.home], 0)
        uploads = layer_uploads(layers, below, choice.num_slots, rounds) / max(layers, 1)
        in_layers = (weights.weight[-1] - weights.weight[choice.home]) * layers / max(self._units - choice.home, 1)
        model = self._question.model
        inputs = model.num_inputs_at_host(choice.host_inputs) * self._question.shape.tokens_per_step * model.boundary
        upload = (uploads * in_layers * 0.5 + carried * grad + inputs) / machine.upload_bytes_per_s.value
        download = ((carried + 1) * grad + inputs) / machine.download_bytes_per_s.value
        disk_s, before_last_s = self._disk.least_seconds(choice.on_disk, machine)
        if machine.is_cpu:
            return work + max(optimizer, disk_s)
        home = compute.home_step_s(weights.trained[choice.home], machine)
        drains = compute.drain_s(weights.trained[choice.home] + (carried + 1) * away, machine)
        total = work + home + drains + weights.orthogonal_s
        window = total if self._question.on_arrival else home + micro_batches * forward + weights.orthogonal_s
        return max(total + max(max(optimizer, before_last_s) - window, 0.0), upload, download, disk_s)

    def compute_s(self, choice: Choice) -> float:
        """Of all micro-batches."""
        return self._compute_of(choice)[0]

    def _compute_of(self, choice: Choice) -> tuple[float, float]:
        """(all micro-batches, the forward of one through the layers)."""
        of_ends = (choice.end_parts if not choice.home else 1, 1 if choice.home == self._units else choice.end_parts)
        in_parts = (*of_ends, choice.expert_parts)
        richer = (choice.richer_budget, choice.richer_layers)
        key = (choice.micro_batch_rows, *choice.computed, *choice.in_layers, *richer, *in_parts)
        if key not in self._paces:
            question, plan = self._question, choice.on(Plan(compile=self._question.compiles))
            pace = compute.pace(question.model, plan, question.shape, question.machine)
            paces = compute.layer_paces(question.model, plan, question.shape, question.machine)
            forward, backward = (sum(directions) for directions in zip(*paces, strict=True))
            count = question.shape.rows_per_step / min(choice.micro_batch_rows, question.shape.rows_per_step)
            self._paces[key] = (count * (forward + backward + pace.ends), forward)
        return self._paces[key]

    def _cut(self, choice: Choice) -> tuple[float, int]:
        """(micro-batches of the first wave, waves) as the engine cuts them."""
        key = choice.cut
        if key not in self._first_wave:
            waves = waves_of(choice.on(Plan()), self._question.shape)
            self._first_wave[key] = (waves[0], len(waves))
        return self._first_wave[key]


def _most(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to ``high`` that fits, or ``low``, which is taken to; what is smaller than one that fits does too."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
