"""Linear head and cross entropy in one go: the gradient is computed in the forward, chunk by chunk, at matmul speed.

For logits z = cap(s * (x W^T + b)) and the sum of cross entropies L: dL/dz = softmax(z) - onehot(label), so one pass over a
chunk's logits gives the loss and the gradient in the same buffer's place; then dx = dz W and dW += dz^T x, the latter
accumulated in fp32. (The idea of Liger-Kernel's fused linear cross entropy, arXiv 2410.10989; measured there and here, the
gain is in never keeping the logits.)

``FusedLinear.of`` proves, on the bound weights and a few real hidden states, that the family's epilogue is such a head, and on
outputs far larger than those, which scale and cap it has; anything else keeps the reference. Checked against it in
``tests/objectives/test_fused_linear.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerferry.models.linear_head import Shape, agree, candidates, spread
from layerferry.models.or_eager import CompiledOrEager
from layerferry.objectives.head import Head

PROBE_TOKENS = 16
"""Hidden states that a head is tried with."""


class FusedLinear:
    """The fused head for one ``Shape``. Compiled on CUDA, plain elsewhere."""

    def __init__(self, shape: Shape, *, compiled: bool) -> None:
        self.shape = shape
        run = CompiledOrEager(_loss_and_gradient, "the loss", dynamic=True) if compiled else _loss_and_gradient
        self._loss_and_gradient: Any = run

    @classmethod
    def of(cls, head: Head, hidden: Tensor) -> FusedLinear | None:
        """The fused form of ``head`` if a numerical check on ``hidden`` [C, D] shows that there is one."""
        if head.skeleton.head is None:
            return None
        with torch.no_grad():
            sample = hidden[:PROBE_TOKENS]
            expected = head.logits(sample).float()
            weight, bias = head.skeleton.head_weight()
            plain = F.linear(head.skeleton.before_head(sample), weight, bias)
            # TRAP: small outputs pass any soft-cap (tests/objectives/test_fused_linear.py)
            wide = spread(plain)
            pairs = [(plain, expected), (wide, head.skeleton.after_head(wide).float())]
            for shape in candidates(head.skeleton.config):
                if all(agree(shape.of(output.float()), logits, plain.dtype) for output, logits in pairs):
                    return cls(shape, compiled=hidden.is_cuda)
        return None

    def step(self, head: Head, hidden: Tensor, labels: Tensor, denominator: float) -> tuple[Tensor, Tensor]:
        """hidden [C, D], labels [C] without ignored ones -> (sum / denominator [] fp32, dL/dhidden [C, D])."""
        assert head.accumulator is not None and head.skeleton.head is not None
        weight_entry, bias_entry = head.skeleton.head
        weight, bias = (None if t is None else t.detach() for t in head.skeleton.head_weight())
        assert weight is not None
        leaf = hidden.detach().requires_grad_(True)
        normed = head.skeleton.before_head(leaf)
        inputs = normed.detach()
        gradient = torch.empty_like(inputs)
        total = torch.zeros((), device=hidden.device)
        for part in head.chunks(labels.numel()):
            logits = F.linear(inputs[part], weight, bias)
            loss, slope = self._loss_and_gradient(logits, labels[part], 1.0 / denominator, self.shape.scale, self.shape.cap)
            del logits
            total = total + loss
            torch.mm(slope, weight, out=gradient[part])
            if weight_entry.trained:
                add_product(head.accumulator.view(weight_entry), slope.t(), inputs[part])
            if bias_entry is not None and bias_entry.trained:
                head.accumulator.view(bias_entry).add_(slope.sum(0, dtype=torch.float32))
            del slope  # two buffers of C x V at the most are alive
        return total, head.backward(normed, leaf, gradient)


def _loss_and_gradient(logits: Tensor, labels: Tensor, weight: float, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """logits [C, V], labels [C] -> (weighted sum of cross entropies [] fp32, its gradient by the unshaped logits [C, V])."""
    values = logits.float() * scale
    if cap is not None:
        values = cap * torch.tanh(values / cap)
    log_sum = torch.logsumexp(values, -1, keepdim=True)
    hit = torch.arange(logits.shape[1], device=logits.device)[None, :] == labels[:, None]
    loss = (log_sum.squeeze(1) - torch.where(hit, values, 0.0).sum(-1)).sum() * weight
    slope = (torch.exp(values - log_sum) - hit.float()) * (weight * scale)
    if cap is not None:
        slope = slope * (1.0 - (values / cap) ** 2)
    return loss, slope.to(logits.dtype)


def add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target [M, N] fp32 += left [M, K] right [K, N], accumulated in fp32."""
    if left.dtype == torch.float32:
        target.addmm_(left, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(target, left, right, torch.float32, out=target)
    else:
        target.add_(torch.mm(left, right))
