"""The oracle: the whole model, plain autograd, no streaming. What the engine must equal.

Nothing of the engine is used: the Hugging Face model computes its own logits, torch's cross entropy the loss, ``torch.autograd`` the gradients. With
``dropout=0`` and fp32 on the CPU the engine equals it to the last bit on every family of the conformance list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from layerferry.engine.batch import IGNORE_INDEX, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_parameters(model: PreTrainedModel, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Copy values by model name into a real (not meta) model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
        for name, value in buffers.items():
            model.get_buffer(name).copy_(value)


def loss_and_gradients(model: PreTrainedModel, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Token-mean loss over all micro-batches [] fp32, and every gradient by parameter name (zeros where autograd gives none)."""
    denominator = sum(micro_batch.num_targets for micro_batch in micro_batches)
    total = torch.zeros(())
    model.zero_grad(set_to_none=True)
    for micro_batch in micro_batches:
        loss = summed_loss(model, micro_batch) / denominator
        loss.backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return total, gradients


def summed_loss(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Sum of the token cross entropies of one micro-batch [] fp32, by the model's own whole forward."""
    given = {"input_ids": micro_batch.input_ids}
    if micro_batch.position_ids is not None:
        given["position_ids"] = micro_batch.position_ids
        if not micro_batch.isolated:
            given["attention_mask"] = torch.ones_like(micro_batch.input_ids)
    device = next(model.parameters()).device
    logits = model(**{name: value.to(device) for name, value in given.items()}, use_cache=False).logits
    targets = micro_batch.labels[:, 1:].reshape(-1).to(device)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
