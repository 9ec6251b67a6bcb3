"""Experts whose weights lie transposed, as grouped products with layouts of our own choosing.

Some families keep an expert's weight as [in, out] (GPT-OSS). The gradient of such a grouped product is x^T [in, S] times
dy [S, out], cut along S, and the CUDA kernel demands that the cut dimension is not the contiguous one unless every expert has
a multiple of 8 tokens. Under ``torch.compile`` transformers' ``grouped_mm`` hands it whatever layout the compiler has chosen
for x and dy, and the device asserts (seen with torch 2.11 on an H200). Here the product is one opaque operator that makes
both contiguous. Other families' weights lie so that the layout cannot go wrong; they keep transformers' own function.

Checked by ``tests/models/test_experts.py`` and ``tests/gpu/test_engine_cuda.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "layerferry_transposed"


def use_where_needed(model: PreTrainedModel) -> bool:
    """Switch experts with transposed weights to ``experts``; says whether there were any."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    modules = [module for module in model.modules() if _is_needed(module)]
    if not modules:
        return False
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    for module in modules:
        module.config._experts_implementation = NAME
    return True


def _is_needed(module: Any) -> bool:
    config = getattr(module, "config", None)
    grouped = getattr(config, "_experts_implementation", None) == "grouped_mm"
    plain = not getattr(module, "has_post_expert_norm", False) and not getattr(module, "_is_expert_parallel", False)
    return grouped and plain and bool(getattr(module, "is_transposed", False)) and bool(getattr(module, "has_gate", False))


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [S, D], top_k_index and top_k_weights [S, K] -> [S, D], as transformers' experts functions.

    Tokens are sorted by expert, and no count is read back to the host.
    """
    count, top_k = hidden_states.shape[0], top_k_index.shape[-1]
    expert_of, order = torch.sort(top_k_index.reshape(-1))
    bins = expert_of.float() if expert_of.device.type == "cpu" else expert_of.int()
    ends = torch.histc(bins, bins=self.num_experts, min=0, max=self.num_experts - 1).cumsum(0).to(torch.int32)
    values = grouped(hidden_states[order // top_k], self.gate_up_proj, ends)
    if self.has_bias:
        values = values + self.gate_up_proj_bias[expert_of]
    values = grouped(self._apply_gate(values), self.down_proj, ends)
    if self.has_bias:
        values = values + self.down_proj_bias[expert_of]
    weighted = values * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return weighted[back].view(count, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def grouped(values: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """values [S, in], weight [E, in, out], ends [E] int32 (where each expert's rows end) -> [S, out]."""
    product: Tensor = _grouped(values.to(weight.dtype), weight, ends)
    return product


@library.custom_op("layerferry::grouped", mutates_args=())
def _grouped(values: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(values.contiguous(), weight, offs=ends)


@library.custom_op("layerferry::grouped_backward", mutates_args=())
def _grouped_backward(gradient: Tensor, values: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    gradient, values = gradient.contiguous(), values.contiguous()
    by_values = F.grouped_mm(gradient, weight.transpose(-2, -1), offs=ends)
    return by_values, F.grouped_mm(values.t(), gradient, offs=ends)


@_grouped.register_fake
def _(values: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], weight.shape[2])


@_grouped_backward.register_fake
def _(gradient: Tensor, values: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
    values, weight, ends = ctx.saved_tensors
    if not ctx.needs_input_grad[1]:  # frozen experts
        return _grouped(gradient, weight.transpose(-2, -1), ends), None, None
    by_values, by_weight = _grouped_backward(gradient, values, weight, ends)
    return by_values, by_weight, None


_grouped.register_autograd(_backward, setup_context=_save)
