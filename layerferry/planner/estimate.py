"""Bytes of activations from a model's widths, good to some ten per cent, where nothing has been measured.

Checked by ``tests/planner/test_memory.py``.
"""

from __future__ import annotations

from layerferry.plan import Plan
from layerferry.planner.facts import Kept, Model
from layerferry.planner.working import LayerBytes, Shape, Working, tokens_of
from layerferry.units import divide

TRANSIENT_ACTIVATIONS = 3
"""Widest activations alive at once beside what is kept: estimate, gate and up projections and their product."""
FUSED_LOGITS = 2
"""Chunks of logits alive at once in the fused head: the logits and their slope."""


def estimated(model: Model, plan: Plan, shape: Shape) -> Working:
    """Of every budget in ``plan``."""
    own, *others = (estimate(model, level, shape) for level in plan.levels)
    return own.beside(others) if others else own


def estimate(model: Model, plan: Plan, shape: Shape) -> Working:
    """Activation bytes from the model's widths: good to some ten per cent, and marked as an estimate."""
    tokens = tokens_of(plan, shape)
    layers = []
    for number, kept in enumerate(model.kept):
        if model.is_divided(number, plan):
            layers.append(_in_parts(model, plan, shape, number))
            continue
        chunk, rows = plan.mlp_chunk_tokens, tokens // max(shape.row_tokens, 1)

        def per_token(budget: float, kept: Kept = kept) -> float:
            return kept.per_token(
                shape.row_tokens, budget, compiled=plan.compile, boundary=model.boundary, chunked=plan.mlp_chunk_tokens > 0
            )

        own, full = tokens * per_token(plan.activation_budget), tokens * per_token(1.0)
        transient = TRANSIENT_ACTIVATIONS * (kept.outer_largest if chunk else kept.largest) * tokens
        if chunk:  # forward and backward of one chunk, and its parameters' gradients in fp32
            inside = (2 * kept.inner + model.boundary) * rows * min(chunk, shape.row_tokens)
            transient += inside + 4 * kept.inner_share * model.kinds[number].num_trained
        gradients = model.kinds[number].num_trained * model.compute_bytes
        backward = full - own + transient + model.boundary * tokens + gradients
        layers.append(LayerBytes(kept=int(own), forward_peak=int(own + transient), backward_peak=int(backward)))
    return Working(
        prologue_kept=_prologue_bytes(model, plan, shape),
        layers=tuple(layers),
        head_peak=_head_bytes(model, plan, shape),
        head_kept=_head_kept(model, plan, shape),
        evaluation_peak=min(plan.chunk_tokens, tokens) * model.head_rows(plan) * (4 + 4 + model.compute_bytes),
    )


def _in_parts(model: Model, plan: Plan, shape: Shape, number: int) -> LayerBytes:
    """Of a layer whose experts travel in parts, whose input is kept elsewhere: nothing is compiled, and of its parameters'
    gradients the largest piece's are there in one piece. A router may send all tokens to one part."""
    tokens, kept = tokens_of(plan, shape), model.kept[number]
    full = tokens * kept.per_token(shape.row_tokens, 1.0, compiled=False, boundary=model.boundary)
    transient = TRANSIENT_ACTIVATIONS * kept.largest * tokens
    gradients = max(piece.num_trained for piece in divide(model.kinds[number], plan.expert_parts)) * model.compute_bytes
    wide = model.hidden_size * 4
    choices = 24 * model.num_choices(number)  # which experts, in what order, with what weights, and dL/d(weights)
    # up: what is asked, and the sums of the answers; down: an input that came from the host, what is asked, the answers, their
    # slopes, and the sums of what goes back
    up, down = model.boundary + wide + choices, 4 * model.boundary + wide + choices
    return LayerBytes(
        kept=tokens * model.boundary,
        forward_peak=int(full + transient),
        backward_peak=int(full + transient + tokens * model.boundary + gradients),
        waiting_up=tokens * up,
        waiting_down=tokens * down,
    )


def _prologue_bytes(model: Model, plan: Plan, shape: Shape) -> int:
    """Ids, positions, rotary tables, masks and hidden states of one micro-batch."""
    tokens = tokens_of(plan, shape)
    places = tokens if shape.packed else shape.row_tokens  # unpacked rows share their positions
    mask = model.isolated_mask_bytes if shape.isolated else model.mask_bytes
    per_token = model.boundary + 8 + mask * shape.row_tokens
    return tokens * per_token + places * (8 + model.rotary_width * model.compute_bytes)


def _head_kept(model: Model, plan: Plan, shape: Shape) -> int:
    """Normed rows, the fp32 sum of their gradient, places, labels, log-sums; 0 for a whole head."""
    if model.head_rows(plan) == model.vocab_size:
        return 0
    return tokens_of(plan, shape) * (model.hidden_size * (model.compute_bytes + 4) + 24)


def _head_bytes(model: Model, plan: Plan, shape: Shape) -> int:
    """Working set of final norm, head and loss for one micro-batch whose tokens all carry loss, its gradient included."""
    tokens = tokens_of(plan, shape)
    chunk = min(plan.chunk_tokens, tokens)
    widths = model.hidden_size * model.compute_bytes
    logits = chunk * model.head_rows(plan)
    if kept := _head_kept(model, plan, shape):
        # two passes over each part's logits; then gradient, chosen rows, the norm's graph and its backward
        of_logits = FUSED_LOGITS * model.compute_bytes if shape.fused_head else 12
        return kept + max(of_logits * logits, tokens * (4 * widths + 16 * model.hidden_size))
    if shape.fused_head and model.has_linear_head:
        # of a chunk: chosen rows, normed rows, their gradient, the norm's graph (fp32 input and the bf16 one) and its backward
        of_chunk = chunk * (5 * widths + 4 * 4 * model.hidden_size)
        return tokens * (widths + 16) + of_chunk + FUSED_LOGITS * logits * model.compute_bytes
    # log-softmax and two gradients in fp32, and the head's weight gradient in one piece
    return tokens * (widths + 16) + 12 * logits + (widths * model.vocab_size if model.flops.trains_head else 0)
