"""Seconds of compute by piece of work: what one micro-batch takes in a layer and in the head, and what sums and updates take.

A layer's time is its matrix products at the machine's rate, plus passes over activations at the device memory's rate, plus
what recomputation adds under the activation budget; every micro-batch also pays for adding the layer's gradient to an fp32
sum, and for launching. Where a layer was timed on the machine and takes quite another time, all of that is multiplied by how much
(``Model.slowness``). Constants are fitted to DESIGN's table for one compiled Qwen2.5-7B layer (16 rows of 1,024 tokens;
624, 629, 597, 565 and 513 model-TFLOP/s at budgets 1.0, 0.7, 0.5, 0.3 and 0.0, about 600 with 8 rows at 0.7) and say where
they come from. A frozen matrix saves the product that would be its gradient, a layer below everything that is trained its
whole backward. Checked by ``tests/planner/test_time.py`` against
whole measured steps of other shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from layerferry.plan import Plan
from layerferry.planner.facts import Model
from layerferry.planner.flops import FORWARD_SHARE
from layerferry.planner.machine import Machine
from layerferry.planner.working import Shape, tokens_of
from layerferry.units import divide

ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.8, 0.56
"""Of the rate of matrix products at which attention runs, by the FLOPs of ``flops.py``: cuDNN's kernels reach 440 to 635 TFLOP/s
forward; backward 330 to 536 of the 5/4 that they really compute."""
FITTED_ROW = 1024
"""Tokens of the rows that the other constants are fitted to: what attention costs there is in them."""
ACTIVATION_PASSES = 5.2
"""Times that a layer's forward and backward move the bytes it keeps at budget 1.0: 2.28 us a token are 1.99 of products at
715 TFLOP/s, 0.09 of sums and launches, and 0.20 of passes over 159 KB at 4.2 TB/s."""
RECOMPUTATION = ((0.0, 1.225), (0.3, 1.109), (0.5, 1.047), (0.7, 0.992), (1.0, 1.0))
"""(activation budget, time over that of budget 1.0) of a compiled layer, sums and launches taken off."""
EAGER, EAGER_REBUILD = 1.18, 1.57
"""Time over that of the compiled layer (540 and 406 beside 636 TFLOP/s): everything kept, everything computed again."""
EXPERT_PASSES = 9.0
"""Times that the rows of fused experts are moved besides: sorted, gathered, weighted, put back and added, both ways. Fitted to
one measurement (Qwen3-30B-A3B's layers, 2.33 s a step); the grouped products themselves ran at the rate of others."""
LAYER_OVERHEAD_S = 1.0e-3
"""Of every layer and micro-batch, whatever its size: 8 rows instead of 16 cost 5 %, of which sums explain a third."""
SUM_BYTES = 10
"""Moved for every parameter to add a bf16 gradient to an fp32 sum."""
DRAIN_BYTES = 12
"""Moved for every parameter to clear a sum, round it and take its norm."""
HOME_STEP_BYTES = 26
"""Moved for every parameter by an update @device."""
LOGIT_PASSES = 6
"""Times that the fused head moves a chunk's logits."""
PART_LOGIT_PASSES = (3, 6)
"""The same of a head in parts: in the pass for the loss, in that for the gradients."""
PART_BYTES = (8, 24, 8)
"""Moved for every element of the hidden states and part: rows picked from an embedding in parts, rows added to its sum, and the
fp32 sum of what a head in parts gives back."""
EXPERT_PART_BYTES = 16
"""Moved for every element of the hidden states, choice of an expert, part and pass: what a part gives is gathered and added to an
fp32 sum. An estimate."""
PART_OVERHEAD_S = 1.0e-4
"""Of every part, micro-batch and pass: a dozen launches."""
CHUNK_LAUNCHES_S = 3.0e-4
"""What the host takes to launch the passes over one chunk of logits, of one part: where the device is faster, it waits. Measured
with chunks of 16 tokens in 16 parts (``least-7b``: 65,536 of them in 20 s)."""
IN_PARTS = 1.95
"""Time of a layer whose experts travel in parts over what its products, sums and passes say: gates, gathers and their backwards
are elementwise passes that nothing fuses. Fitted to one measurement (gpt-oss-120b in four parts, 79 ms for 8,192 tokens)."""
CPU_SHARE, CPU_REBUILD = 0.6, 4 / 3
"""Of the rate of matrix products that plain torch reaches on a CPU; and the second forward of a rebuild."""
STEP_SHARE = 0.98
"""Share of a step in which the device is busy while nothing is waited for (docs/img/timeline.png)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds that one micro-batch takes. ``layers``: (forward, backward) by behaviour; ``attention``: of that, one layer's
    attention forward; ``inner``: of parts that may run in chunks, one forward, by behaviour."""

    layers: tuple[tuple[float, float], ...]
    head: float
    attention: float = 0.0
    inner: tuple[float, ...] = ()
    look: float = 0.0
    """What of ``head`` is the first pass over a head in parts."""
    embedding: tuple[float, float] = (0.0, 0.0)
    """(forward, backward) of an embedding in parts."""

    @property
    def ends(self) -> float:
        return self.head + sum(self.embedding)


def layer_paces(model: Model, plan: Plan, shape: Shape, machine: Machine) -> list[tuple[float, float]]:
    """(forward, backward) seconds of one micro-batch in every layer, each under its own budget; one that is computed again has a
    second forward in its backward, one below everything that is trained has none."""
    by_budget = {level.activation_budget: pace(model, level, shape, machine) for level in plan.levels}
    bare = replace(plan.levels[0], compile=False, activation_budget=1.0)
    divided = {
        number: _in_parts(model, bare, shape, machine, number)
        for number in range(len(model.kept))
        if model.is_divided(number, plan)
    }
    found, again = [], plan.num_rebuilt(model.num_layers)
    launches = PART_OVERHEAD_S * tokens_of(plan, shape) / max(plan.mlp_chunk_tokens, 1)
    for index, (budget, behaviour) in enumerate(zip(plan.layer_budgets(model.num_layers), model.behaviours, strict=True)):
        own = by_budget[budget]
        forward, backward = divided.get(behaviour) or own.layers[behaviour]
        if index < again and behaviour not in divided:
            backward += forward - (own.attention if index >= model.num_layers - plan.kept_attention else 0.0)
            if plan.mlp_chunk_tokens:
                waits = max(launches - own.inner[behaviour], 0.0)  # of each pass over chunks that are too small
                forward, backward = forward + waits, backward + own.inner[behaviour] + 2 * waits
        found.append((forward, backward if index >= model.num_below else 0.0))
    return found


def _in_parts(model: Model, plan: Plan, shape: Shape, machine: Machine, number: int) -> tuple[float, float]:
    """(forward, backward) of a layer whose experts travel in parts: up, its body runs twice; down, the body three times and the
    experts twice before the backward of either. Nothing is compiled."""
    forward, backward = pace(model, plan, shape, machine).layers[number]
    body = forward * model.body_share(number)
    parts, moved = len(divide(model.kinds[number], plan.expert_parts)) - 1, EXPERT_PART_BYTES * model.num_choices(number)
    moved_s = tokens_of(plan, shape) * model.hidden_size * moved / machine.device_bytes_per_s.value
    passing = parts * (moved_s + PART_OVERHEAD_S)
    return IN_PARTS * (forward + body) + passing, IN_PARTS * (2 * forward + body + backward) + 2 * passing


def pace(model: Model, plan: Plan, shape: Shape, machine: Machine) -> Pace:
    """Of full micro-batches of ``plan``, layers under its ``activation_budget``."""
    tokens, speed = tokens_of(plan, shape), machine.matmul_flops_per_s.value
    moved_s = 1.0 / (machine.device_bytes_per_s.value * STEP_SHARE)
    layer_flops = (model.flops.whole(shape.row_tokens) - 6.0 * model.flops.head_params) / max(model.num_layers, 1)
    own_gradient = 2.0 * model.flops.layer_params / max(model.num_layers, 1)
    if machine.is_cpu:
        return _on_cpu(model, plan, shape, machine)
    again = recomputation(plan)
    whole = _interpolate(RECOMPUTATION, 1.0) if plan.compile else EAGER
    fitted = min(shape.row_tokens, FITTED_ROW)
    attention = tokens * (model.flops.whole(shape.row_tokens) - model.flops.whole(fitted)) / max(model.num_layers, 1)
    layer_flops -= attention / tokens
    attend = attention / 3 / (speed * ATTENTION_FORWARD * STEP_SHARE)
    attend_back = 2 * attention / 3 / (speed * ATTENTION_BACKWARD * STEP_SHARE)
    attend_again = attend * max(again / whole - 1.0, 0.0) / (RECOMPUTATION[0][1] - 1.0)
    layers, inner = [], []
    slowness = model.slowness or (1.0,) * len(model.kept)
    for number, (kept, slower) in enumerate(zip(model.kept, slowness, strict=True)):
        products = layer_flops / (speed * STEP_SHARE)
        passes = ACTIVATION_PASSES * kept.compiled + EXPERT_PASSES * kept.routed
        work = tokens * (products + passes * moved_s)
        kind = model.kinds[number]
        sums = SUM_BYTES * kind.num_trained * moved_s
        idle = tokens * own_gradient * (1 - kind.num_trained / kind.numel) / (speed * STEP_SHARE)
        forward = work * whole * FORWARD_SHARE + LAYER_OVERHEAD_S * FORWARD_SHARE
        backward = work * again - work * whole * FORWARD_SHARE + LAYER_OVERHEAD_S * (1 - FORWARD_SHARE) + sums - idle
        layers.append((slower * (forward + attend), slower * (backward + attend_back + min(attend_again, attend))))
        inner.append(slower * tokens * products * FORWARD_SHARE * kept.inner_share)
    ends = _ends(model, plan, tokens, machine)
    return Pace(layers=tuple(layers), attention=min(slowness) * attend, inner=tuple(inner), **ends)


def _ends(model: Model, plan: Plan, tokens: int, machine: Machine) -> dict[str, Any]:
    """The fields of a ``Pace`` for head and embedding. A head in parts computes its logits twice."""
    moved_s = 1.0 / (machine.device_bytes_per_s.value * STEP_SHARE)
    product = 2.0 * tokens * model.flops.head_params / (machine.matmul_flops_per_s.value * STEP_SHARE)
    logits = tokens * model.vocab_size * model.compute_bytes * moved_s
    chunks = -(-tokens // max(min(plan.chunk_tokens, tokens), 1))
    in_sums = chunks * SUM_BYTES * model.flops.head_params * moved_s if model.flops.trains_head else 0.0
    products = product * model.flops.head / (2.0 * model.flops.head_params)
    first, last = (len(pieces) for pieces in model.pieces_of_ends(plan))
    hidden = tokens * model.hidden_size * moved_s
    picked, added, given_back = (per_element * hidden + PART_OVERHEAD_S for per_element in PART_BYTES)
    added = added if model.units[0].num_trained else 0.0
    embedding = (0.0, 0.0) if first == 1 else (first * picked, first * added)
    launches = last * chunks * CHUNK_LAUNCHES_S
    if last == 1:
        return {"head": max(products + LOGIT_PASSES * logits + in_sums, launches), "embedding": embedding}
    once, again = PART_LOGIT_PASSES
    look = max(product + once * logits, launches) + last * PART_OVERHEAD_S
    pull = max(products + again * logits + in_sums, launches) + last * given_back
    return {"head": look + pull, "look": look, "embedding": embedding}


def _on_cpu(model: Model, plan: Plan, shape: Shape, machine: Machine) -> Pace:
    """Products at a stated share of their rate, and the sums."""
    tokens, speed = tokens_of(plan, shape), machine.matmul_flops_per_s.value * CPU_SHARE
    layer_flops = (model.flops.whole(shape.row_tokens) - 6.0 * model.flops.head_params) / max(model.num_layers, 1)
    own_gradient = tokens * 2.0 * model.flops.layer_params / max(model.num_layers, 1) / speed
    forward = tokens * layer_flops * FORWARD_SHARE / speed
    products = forward * (3 * (1.0 if plan.activation_budget >= 1.0 else CPU_REBUILD) - 1)
    layers = []
    for kind in model.kinds:
        sums = SUM_BYTES * kind.num_trained / machine.device_bytes_per_s.value
        layers.append((forward, products + sums - own_gradient * (1 - kind.num_trained / kind.numel)))
    look = 0.0 if model.head_rows(plan) == model.vocab_size else tokens * 2.0 * model.flops.head_params / speed
    return Pace(layers=tuple(layers), head=tokens * model.flops.head / speed + look, look=look, inner=(forward,) * len(layers))


def recomputation(plan: Plan) -> float:
    """Time of a layer over that of one that is compiled and keeps everything."""
    if plan.compile:
        return _interpolate(RECOMPUTATION, plan.activation_budget)
    return EAGER if plan.activation_budget >= 1.0 else EAGER_REBUILD


def drain_s(num_params: float, machine: Machine) -> float:
    """Passes over the sums of ``num_params``, once a drain."""
    return DRAIN_BYTES * num_params / machine.device_bytes_per_s.value


def home_step_s(num_params: int, machine: Machine) -> float:
    """Updates of the units that live @device, all together."""
    return HOME_STEP_BYTES * num_params / machine.device_bytes_per_s.value


def _interpolate(table: tuple[tuple[float, float], ...], at: float) -> float:
    for (left, low), (right, high) in pairwise(table):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return table[-1][1]
