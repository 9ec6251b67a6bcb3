"""Bytes by place: planes, slots, slabs and accumulators exactly; activations from measurements (``calibrate.py``) or from an
estimate.

What is alive @device when a step is at its fullest, following ``engine/sweep.py`` (M micro-batches of t tokens a wave, L
layers, D hidden):

- always: slots, slabs, accumulators (``engine/sizes.py``), buffers, the libraries' workspaces;
- for the wave: ids, masks, rotary tables and the first hidden states of all M micro-batches, because a pass keeps the
  prologue's graph;
- kept: every (layer, micro-batch) keeps its *output* and what autograd saved. A layer's input is the output of the one below
  (shared storage: it is counted there), so L layers and the prologue hold L + 1 hidden states. Saved weights are handles and
  cost nothing;
- forward: the peak is in a layer's last micro-batch, on top of what all before have kept: ``forward_peak`` minus that
  micro-batch's own ``kept``;
- head: everything is kept, gradients of the micro-batches before are there (D each), and one head's working set on top;
- backward: the first micro-batch of a layer is the fullest: everything below is kept, all M gradients are there, and on top
  come this layer's own transients, among them its parameters' gradients in one piece, before they are added to the
  accumulator;
- a head @device rounds its sum at the end of that phase, through a copy;
- the prologue's backward and the drains' casts are smaller than any of these and are not counted.

The total is the largest of the phases; ``items`` lists what is alive in that phase. Exact means: a test holds it equal to
what is allocated. Left out: fragmentation and the device context (outside the allocator's count; ``choose.py`` leaves room),
and what the first, compiling step needs. Checked by ``tests/planner/test_memory.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from layerferry.engine.sizes import DeviceSizes, device_sizes
from layerferry.layout import FP32_PLANE, GRAD, RESIDUE, WEIGHT, PlaneSpec
from layerferry.plan import Item, Plan
from layerferry.planner.facts import Model

HOST, DEVICE = "@host", "@device"
TRANSIENT_ACTIVATIONS = 3
"""Widest activations alive at once beside what is kept: estimate, gate and up projections and their product."""
FUSED_LOGITS = 2
"""Chunks of logits alive at once in the fused head: the logits and their slope."""
_NAMES = {
    WEIGHT: "weights (bf16: high half of the master)",
    RESIDUE: "residues (the rest of the master)",
    GRAD: "gradients",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a step is made of, whatever the plan."""

    row_tokens: int
    rows_per_step: int
    isolated: bool = False
    """Packed samples that must not see each other: dense masks."""
    packed: bool = False
    evaluates: bool = False
    fused_head: bool = False

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.row_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """One layer, one micro-batch: what its forward leaves; peaks above the level before its forward, and before its backward."""

    kept: int
    forward_peak: int
    backward_peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Bytes of one micro-batch's activations. ``layers`` by behaviour; ``evaluation_peak`` of the head without gradient."""

    prologue_kept: int
    layers: tuple[LayerBytes, ...]
    head_peak: int
    evaluation_peak: int
    router_gradients: int = 0
    """Of the load-balancing loss by router logits: they wait for the layers' backward."""
    workspaces: int = 0
    measured: bool = False
    richer: tuple[LayerBytes, ...] = ()
    """The same of layers that keep more, by behaviour."""

    def beside(self, richer: Working) -> Working:
        """This one, for a plan whose last layers keep what ``richer`` does."""
        return replace(
            self,
            richer=richer.layers,
            head_peak=max(self.head_peak, richer.head_peak),
            workspaces=max(self.workspaces, richer.workspaces),
            measured=self.measured and richer.measured,
        )

    def of_layers(self, model: Model, plan: Plan) -> list[LayerBytes]:
        """In layer order."""
        leaner = model.num_layers - plan.richer_layers
        return [(self.layers if i < leaner else self.richer)[behaviour] for i, behaviour in enumerate(model.behaviours)]

    def times(self, measured: Working, estimated: Working) -> Working:
        """This estimate, each number multiplied by how far ``measured`` was from the ``estimated`` of another shape."""

        def scaled(own: int, truth: int, guess: int) -> int:
            return own if not guess else own * truth // guess

        layers = tuple(
            LayerBytes(
                kept=scaled(own.kept, truth.kept, guess.kept),
                forward_peak=scaled(own.forward_peak, truth.forward_peak, guess.forward_peak),
                backward_peak=scaled(own.backward_peak, truth.backward_peak, guess.backward_peak),
            )
            for own, truth, guess in zip(self.layers, measured.layers, estimated.layers, strict=True)
        )
        return Working(
            prologue_kept=scaled(self.prologue_kept, measured.prologue_kept, estimated.prologue_kept),
            layers=layers,
            head_peak=scaled(self.head_peak, measured.head_peak, estimated.head_peak),
            evaluation_peak=scaled(self.evaluation_peak, measured.evaluation_peak, estimated.evaluation_peak),
            router_gradients=scaled(measured.router_gradients, self.prologue_kept, estimated.prologue_kept),
            workspaces=measured.workspaces,
        )


def plan_specs(specs: Mapping[str, PlaneSpec], plan: Plan) -> dict[str, PlaneSpec]:
    """``specs`` with the gradient plane that ``plan`` wants: four bytes where it is carried between waves exactly."""
    return {**specs, GRAD: FP32_PLANE} if plan.carry_fp32 else dict(specs)


def items(
    model: Model, specs: Mapping[str, PlaneSpec], plan: Plan, shape: Shape, working: Working | None = None
) -> tuple[Item, ...]:
    """The byte table of ``plan``; ``working`` None: estimated."""
    specs = plan_specs(specs, plan)
    working = working or estimate(model, plan, shape)
    home = frozenset(plan.on_device)
    return (*planes(model, specs, home), *buffers(model, specs, plan), *activations(model, plan, shape, working))


def planes(model: Model, specs: Mapping[str, PlaneSpec], home: frozenset[int]) -> tuple[Item, ...]:
    """One line a plane kind @host, one for the units at home @device: exactly what the store allocates."""
    host, device = [], 0
    for kind, spec in specs.items():
        by_unit = unit_bytes(model, spec)
        there = sum(by_unit[index] for index in home)
        host.append(Item(what=_NAMES.get(kind, kind), place=HOST, num_bytes=sum(by_unit) - there))
        at_home = unit_bytes(model, FP32_PLANE if kind == GRAD else spec)  # gradients are summed where they are read
        device += sum(at_home[index] for index in home)
    if home:
        host.append(Item(what=f"all planes of {len(home)} of {len(model.units)} units", place=DEVICE, num_bytes=device))
    return tuple(host)


@lru_cache(maxsize=64)
def unit_bytes(model: Model, spec: PlaneSpec) -> tuple[int, ...]:
    """Bytes of one plane of every unit: asked for thousands of times in a search."""
    return tuple(unit.layout.bytes(spec) for unit in model.units)


@lru_cache(maxsize=64)
def _sizes(model: Model, plan: Plan, specs: tuple[tuple[str, PlaneSpec], ...]) -> dict[bool, DeviceSizes]:
    return device_sizes(model.units, plan, dict(specs))


def buffers(model: Model, specs: Mapping[str, PlaneSpec], plan: Plan) -> tuple[Item, ...]:
    bare = Plan(
        num_slots=plan.num_slots,
        num_slabs=plan.num_slabs,
        on_device=plan.on_device,
        num_waves=plan.num_waves,
        resident_gradients=plan.resident_gradients,
    )
    sizes = _sizes(model, bare, tuple(specs.items()))
    layers, ends = sizes[True], sizes[False]
    slots, own_slot = (size.num_slots * size.slot_bytes for size in (layers, ends))
    slabs, own_slab = (size.total - size.num_slots * size.slot_bytes - size.accumulator_bytes for size in (layers, ends))
    num_slabs = layers.num_slabs + layers.num_landings
    return (
        Item(what=f"{layers.num_slots} layer slots", place=DEVICE, num_bytes=slots),
        Item(what="slot of embedding and head", place=DEVICE, num_bytes=own_slot),
        Item(what=f"{num_slabs} layer slabs", place=DEVICE, num_bytes=slabs),
        Item(what="slabs of embedding and head", place=DEVICE, num_bytes=own_slab),
        Item(what="gradient accumulators (fp32)", place=DEVICE, num_bytes=layers.accumulator_bytes + ends.accumulator_bytes),
    )


def activations(model: Model, plan: Plan, shape: Shape, working: Working) -> tuple[Item, ...]:
    total = micro_batches_of_wave(plan, shape)
    gradients = total * (tokens_of(plan, shape) * model.boundary + working.router_gradients)
    layers = working.of_layers(model, plan)
    kept = [layer.kept for layer in layers]
    head = max(working.head_peak - gradients // total, _rounded_at_home(model, plan))  # its peak has a gradient in it
    phases = _phases(layers, total, gradients, head)
    if shape.evaluates:
        hidden = gradients + total * working.prologue_kept
        phases["head of an evaluation"] = (0, hidden + working.evaluation_peak - total * (sum(kept) + working.prologue_kept))
    phase = max(phases, key=lambda name: sum(phases[name]))
    there, transient = phases[phase]
    exact = working.measured
    lines = [
        ("buffers and library workspaces", model.buffer_bytes + working.workspaces),
        ("inputs and first hidden states", total * working.prologue_kept),
        ("kept activations", total * sum(kept)),
        ("gradients of hidden states", there),
        (f"working set: {phase}", transient),
    ]
    return tuple(Item(what=what, place=DEVICE, num_bytes=num_bytes, exact=exact) for what, num_bytes in lines)


def _rounded_at_home(model: Model, plan: Plan) -> int:
    """The head's gradient once more in the weights' dtype, while a head @device rounds its sum (engine/drain.py)."""
    head = model.units[-1]
    return 0 if model.tied or head.index not in plan.on_device else head.numel * model.compute_bytes


def _phases(layers: list[LayerBytes], total: int, gradients: int, head: int) -> dict[str, tuple[int, int]]:
    """Phase -> (gradients of hidden states, the rest) in bytes relative to everything kept."""
    everything = total * sum(layer.kept for layer in layers)
    forward, backward, below = 0, -everything, 0
    for layer in layers:
        forward = max(forward, below + (total - 1) * layer.kept + layer.forward_peak - everything)
        below += total * layer.kept
        backward = max(backward, below + layer.backward_peak - everything)
    return {
        "forward of a layer": (0, forward),
        "head and loss": (gradients, head),
        "backward of a layer": (gradients, backward),
    }


def tokens_of(plan: Plan, shape: Shape) -> int:
    """Tokens of a full micro-batch."""
    return min(plan.micro_batch_rows, shape.rows_per_step) * shape.row_tokens


def micro_batches_of_wave(plan: Plan, shape: Shape) -> int:
    """Micro-batches of the largest wave, as the engine cuts them."""
    micro_batches = -(-shape.rows_per_step // plan.micro_batch_rows)
    return -(-micro_batches // min(plan.num_waves, micro_batches))


def estimate(model: Model, plan: Plan, shape: Shape) -> Working:
    """Activation bytes from the model's widths: good to some ten per cent, and marked as an estimate."""
    tokens = tokens_of(plan, shape)
    layers = []
    for number, kept in enumerate(model.kept):
        own = tokens * kept.per_token(shape.row_tokens, plan.activation_budget, compiled=plan.compile, boundary=model.boundary)
        full = tokens * kept.per_token(shape.row_tokens, 1.0, compiled=plan.compile, boundary=model.boundary)
        transient = TRANSIENT_ACTIVATIONS * kept.largest * tokens
        gradients = model.kinds[number].numel * model.compute_bytes
        backward = full - own + transient + model.boundary * tokens + gradients
        layers.append(LayerBytes(kept=int(own), forward_peak=int(own + transient), backward_peak=int(backward)))
    return Working(
        prologue_kept=_prologue_bytes(model, plan, shape),
        layers=tuple(layers),
        head_peak=_head_bytes(model, plan, shape),
        evaluation_peak=min(plan.chunk_tokens, tokens) * model.vocab_size * (4 + 4 + model.compute_bytes),
    )


def _prologue_bytes(model: Model, plan: Plan, shape: Shape) -> int:
    """Ids, positions, rotary tables, masks and hidden states of one micro-batch."""
    tokens = tokens_of(plan, shape)
    places = tokens if shape.packed else shape.row_tokens  # unpacked rows share their positions
    mask = model.isolated_mask_bytes if shape.isolated else model.mask_bytes
    per_token = model.boundary + 8 + mask * shape.row_tokens
    return tokens * per_token + places * (8 + model.rotary_width * model.compute_bytes)


def _head_bytes(model: Model, plan: Plan, shape: Shape) -> int:
    """Working set of final norm, head and loss for one micro-batch whose tokens all carry loss, its gradient included."""
    tokens = tokens_of(plan, shape)
    chunk = min(plan.chunk_tokens, tokens)
    widths = model.hidden_size * model.compute_bytes
    logits = chunk * model.vocab_size
    if shape.fused_head and model.has_linear_head:
        # gradient, chosen rows, normed rows, their gradient; the norm's graph (fp32 input and the bf16 one)
        rows = tokens * (5 * widths + 4 * model.hidden_size + 16)
        norm_backward = 3 * 4 * model.hidden_size * tokens
        return rows + max(FUSED_LOGITS * logits * model.compute_bytes, norm_backward)
    # log-softmax and two gradients in fp32, and the head's weight gradient in one piece
    return tokens * (widths + 16) + 12 * logits + widths * model.vocab_size
