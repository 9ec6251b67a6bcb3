"""A layer's forward on ``meta`` tensors, shapes only and no arithmetic: what autograd would keep of it, how wide its linear
modules are, and whether it runs without its experts. Checked by ``tests/planner/test_facts.py``."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from layerferry.models.experts_in_parts import ExpertsTap
from layerferry.models.graph import tensors_in
from layerferry.models.stack import LayerCall


@dataclass(frozen=True, slots=True)
class Run:
    """What one layer's forward was."""

    kept: float  # bytes per token, output counted, input and parameters not
    linear: int  # elements per token: outputs and distinct inputs of linear modules


def run_on_meta(layer: nn.Module, call: LayerCall, num_tokens: int, hidden_size: int) -> Run:
    """One row of ``num_tokens``."""
    twin = copy.deepcopy(layer).to("meta").train()
    hidden, call = _given_on_meta(twin, call, num_tokens, hidden_size)
    given = [*twin.parameters(), *twin.buffers(), *tensors_in((call.args, call.kwargs))]
    known = {_storage(t) for t in given}
    saved: dict[int, Tensor] = {}
    inputs: dict[int, Tensor] = {}
    outputs = 0

    def pack(tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta" and _storage(tensor) not in known:
            saved[_storage(tensor)] = tensor
        return tensor

    def note(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        nonlocal outputs
        outputs += output.shape[-1]
        inputs[_storage(given[0])] = given[0]

    hooks = [m.register_forward_hook(note) for m in twin.modules() if is_linear(m)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _run(twin, hidden, call)
    for hook in hooks:
        hook.remove()
    saved.pop(_storage(hidden), None)
    kept = sum(t.untyped_storage().nbytes() for t in saved.values()) + hidden.numel() * hidden.dtype.itemsize
    return Run(kept / num_tokens, outputs + sum(t.shape[-1] for t in inputs.values()))


def run_body_on_meta(layer: nn.Module, call: LayerCall, num_tokens: int, hidden_size: int) -> None:
    """Without its experts; raises ``ExpertsRefused`` where it cannot be."""
    twin = copy.deepcopy(layer).to("meta").train()
    with ExpertsTap(twin).asking():
        _run(twin, *_given_on_meta(twin, call, num_tokens, hidden_size))


def _given_on_meta(layer: nn.Module, call: LayerCall, num_tokens: int, hidden_size: int) -> tuple[Tensor, LayerCall]:
    dtype = next(layer.parameters()).dtype
    hidden = torch.zeros(1, num_tokens, hidden_size, dtype=dtype, device="meta", requires_grad=True)
    return hidden, replace(call, args=_on_meta(call.args), kwargs=_on_meta(call.kwargs))


def _run(layer: nn.Module, hidden: Tensor, call: LayerCall) -> None:
    if call.hidden_name is None:
        layer(hidden, *call.args, **call.kwargs)
    else:
        layer(*call.args, **{call.hidden_name: hidden}, **call.kwargs)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _on_meta(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_on_meta(item) for item in value)
    return value


def is_linear(module: nn.Module) -> bool:
    """A matrix multiplication as a module; GPT-2 calls its own ``Conv1D``."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
