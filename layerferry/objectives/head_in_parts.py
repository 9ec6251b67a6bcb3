"""Cross entropy over a vocabulary that is never whole: the head in parts, in two passes over them.

The first pass adds up, block of rows by block, the log-sum-exp of each token's logits and finds the logit of its label: that
is the loss. The second computes each block's logits again, and from them slope = softmax - onehot, the block's own gradient
dW += slope^T x, and its share of dx += slope W, which is summed in fp32 and rounded once. So a pass of all micro-batches needs
one block of weights at a time, at the price of one more product with the head.

The formulas are those of ``fused_linear.py``, whose trial decides, on the first block, whether the family's epilogue is such a
head. Checked by ``tests/objectives/test_head_in_parts.py`` against fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerferry.engine.batch import MicroBatch
from layerferry.models.linear_head import Shape
from layerferry.models.or_eager import CompiledOrEager
from layerferry.objectives.fused_linear import add_product
from layerferry.objectives.head import Head, Targets


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of the linear head: the vocabulary's entries ``first``, ``first`` + 1, ..."""

    first: int
    weight: Tensor  # [R, D] @device
    bias: Tensor | None  # [R] @device
    chunk_tokens: int
    weight_sum: Tensor | None = None  # [R, D] fp32 @device; None in the first pass
    bias_sum: Tensor | None = None  # [R] fp32 @device

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        for start in range(0, num_tokens, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, num_tokens))


@dataclass(slots=True)
class Tokens:
    """The trained tokens of one micro-batch on their way through the blocks."""

    targets: Targets
    inputs: Tensor  # [C, D] @device: what the linear head is given
    log_sum: Tensor  # [C] fp32 @device: of the exponentials of the logits seen so far
    of_label: Tensor  # [C] fp32 @device: the label's logit, once its block was seen
    gradient: Tensor | None = None  # [C, D] fp32 @device


class HeadInParts:
    """For one ``Shape``. Compiled on CUDA, plain elsewhere."""

    def __init__(self, shape: Shape, *, compiled: bool) -> None:
        self.shape = shape

        def prepared(function: Any) -> Any:
            return CompiledOrEager(function, "the loss of a head in parts", dynamic=True) if compiled else function

        self._look, self._slope = prepared(_look), prepared(_slope)

    def begin(self, head: Head, hidden: Tensor, micro_batch: MicroBatch) -> Tokens:
        """hidden [B, T, D] through what comes before the linear head, which must be bound."""
        targets = Targets.of(micro_batch, hidden.device)
        chosen = _chosen(hidden, targets)
        with torch.no_grad():
            inputs = head.skeleton.before_head(chosen) if len(targets) else chosen
        empty = torch.full((len(targets),), -torch.inf, device=hidden.device)
        return Tokens(targets, inputs, empty, torch.zeros_like(empty))

    def look(self, block: Block, tokens: Tokens) -> None:
        """The first pass."""
        with torch.no_grad():
            for part in block.chunks(len(tokens.targets)):
                logits = F.linear(tokens.inputs[part], block.weight, block.bias)
                labels = tokens.targets.labels[part] - block.first
                log_sum, of_label = self._look(logits, labels, self.shape.scale, self.shape.cap)
                tokens.log_sum[part] = torch.logaddexp(tokens.log_sum[part], log_sum)
                tokens.of_label[part] += of_label

    def loss(self, tokens: Tokens) -> Tensor:
        """Sum of cross entropies [] fp32 after the first pass."""
        return (tokens.log_sum - tokens.of_label).sum()

    def pull(self, block: Block, tokens: Tokens, denominator: float) -> None:
        """The second pass: adds to the block's sums, and to the gradient of what the head was given."""
        if tokens.gradient is None:
            tokens.gradient = torch.zeros(tokens.inputs.shape, dtype=torch.float32, device=tokens.inputs.device)
        with torch.no_grad():
            for part in block.chunks(len(tokens.targets)):
                inputs = tokens.inputs[part]
                logits = F.linear(inputs, block.weight, block.bias)
                labels = tokens.targets.labels[part] - block.first
                slope = self._slope(logits, labels, tokens.log_sum[part], 1.0 / denominator, self.shape.scale, self.shape.cap)
                del logits
                add_product(tokens.gradient[part], slope, block.weight)
                if block.weight_sum is not None:
                    add_product(block.weight_sum, slope.t(), inputs)
                if block.bias_sum is not None:
                    block.bias_sum.add_(slope.sum(0, dtype=torch.float32))

    def finish(self, head: Head, hidden: Tensor, tokens: Tokens) -> Tensor:
        """dL/dhidden [B, T, D] after the second pass; adds the gradients of what comes before the linear head, which must be
        bound again, to the accumulator."""
        flat = torch.zeros_like(hidden).view(-1, hidden.shape[-1])
        if tokens.gradient is not None and len(tokens.targets):
            leaf = _chosen(hidden, tokens.targets).requires_grad_(True)
            normed = head.skeleton.before_head(leaf)
            gradient, tokens.gradient = tokens.gradient.to(normed.dtype), None
            flat.index_copy_(0, tokens.targets.rows, head.backward(normed, leaf, gradient))
        return flat.view_as(hidden)


def _chosen(hidden: Tensor, targets: Targets) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1]).index_select(0, targets.rows)


def _values(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    values = logits.float() * scale
    return values if cap is None else cap * torch.tanh(values / cap)


def _look(logits: Tensor, labels: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """logits [C, R], labels [C] counted from the block's first row -> (log-sum-exp [C], the label's logit or 0 [C]), fp32."""
    values = _values(logits, scale, cap)
    return torch.logsumexp(values, -1), torch.where(_hits(logits, labels), values, 0.0).sum(-1)


def _slope(logits: Tensor, labels: Tensor, log_sum: Tensor, weight: float, scale: float, cap: float | None) -> Tensor:
    """The gradient of the weighted cross entropies by the unshaped logits [C, R], in their dtype."""
    values = _values(logits, scale, cap)
    slope = (torch.exp(values - log_sum[:, None]) - _hits(logits, labels).float()) * (weight * scale)
    if cap is not None:
        slope = slope * (1.0 - (values / cap) ** 2)
    return slope.to(logits.dtype)


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """[C, R]: a label outside of the block hits nothing."""
    hits: Tensor = torch.arange(logits.shape[1], device=logits.device)[None, :] == labels[:, None]
    return hits
