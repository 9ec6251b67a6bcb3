"""A layer without state: its parameters are views into a slot, so the slot *is* the layer.

Layers that behave alike share a template per slot. "Alike" is the class, the parameter structure and what of it is trained,
and every plain attribute that can change the mathematics (window, rope on or off, layer type): shape keys gave wrong
gradients on exaone4, smollm3 and cohere2. Too fine a key costs a little memory and a compilation; too coarse a key costs
correctness.
"""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from layerferry.layout import Plane
from layerferry.models.attention_outputs import AttentionOutputs, Results
from layerferry.models.experts_in_parts import ExpertsTap
from layerferry.models.router_balance import RouterBalance
from layerferry.models.stack import LayerCall, hidden_of

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.Size, enum.Enum)
_INDEX_NAMES = ("layer_idx", "layer_index", "layer_id")


def behaviour_key(layer: nn.Module) -> Hashable:
    """Equal for two layers only if they compute the same function of their parameters, buffers and inputs."""
    attributes: list[tuple[str, str, str]] = []
    for name, module in layer.named_modules():
        attributes.append((name, "class", type(module).__qualname__))
        for attribute, value in sorted(vars(module).items()):
            if attribute.startswith("_") or attribute in (*_INDEX_NAMES, "training", "config"):
                continue
            if isinstance(value, _PLAIN) or (isinstance(value, (tuple, list)) and all(isinstance(v, _PLAIN) for v in value)):
                attributes.append((name, attribute, repr(value)))
            elif isinstance(value, dict) and all(isinstance(v, _PLAIN) for v in value.values()):
                attributes.append((name, attribute, repr(sorted(value.items(), key=repr))))
            elif callable(value):
                attributes.append((name, attribute, _function_name(value)))
    parameters = tuple((name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in layer.named_parameters())
    buffers = tuple((name, tuple(b.shape), str(b.dtype)) for name, b in layer.named_buffers())
    return (type(layer).__qualname__, parameters, buffers, tuple(attributes))


def _function_name(function: Any) -> str:
    """Without addresses: the same in every process."""
    if isinstance(function, functools.partial):
        return f"{_function_name(function.func)}{function.args}{sorted(function.keywords.items())}"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


class Template:
    """One behaviour in one slot. ``parameters`` follow the order of the layout's entries."""

    def __init__(self, layer: nn.Module, plane: Plane, balance: RouterBalance | None = None) -> None:
        self.module = copy.deepcopy(layer)
        self.run: Callable[..., Any] = self.module
        """The layer's forward: the module, or what the compiler made of it."""
        self.routed: list[Tensor] = [] if balance is None else balance.watch(self.module)
        """Router logits of the last call, where a load-balancing loss is wanted."""
        self.attention: AttentionOutputs | None = None
        """Where attention is not to be computed twice."""
        self.experts: ExpertsTap | None = None
        """Where the slot has the layer's body alone."""
        self.parameters: list[nn.Parameter] = []
        for entry in plane.layout.entries:
            owner, leaf = _owner(self.module, entry.name)
            old = owner._parameters[leaf]
            assert old is not None
            parameter = nn.Parameter(plane.view(entry), requires_grad=old.requires_grad)
            owner._parameters[leaf] = parameter
            self.parameters.append(parameter)
        self._indexed = [(m, name) for m in self.module.modules() for name in _INDEX_NAMES if hasattr(m, name)]
        self._buffer_owners = {name: _owner(self.module, name) for name, _ in self.module.named_buffers()}

    def bind(self, index: int, buffers: Mapping[str, Tensor]) -> Template:
        """Become layer ``index``: its number, and its own buffers (router bias corrections and the like)."""
        for module, name in self._indexed:
            setattr(module, name, index)
        for name, (owner, leaf) in self._buffer_owners.items():
            owner._buffers[leaf] = buffers[name]
        return self

    def tap_experts(self) -> None:
        """From now on the layer runs without its experts."""
        self.experts = ExpertsTap(self.module)

    def keep_attention(self) -> None:
        """From now on ``recording`` and ``answering`` have an effect."""
        self.attention = AttentionOutputs()
        self.attention.watch(self.module)

    def remember(self) -> Callable[[], None]:
        """What takes back what the call under way leaves behind from here on, for it is made again."""
        count, again = len(self.routed), None if self.attention is None else self.attention.remember()

        def undo() -> None:
            del self.routed[count:]
            if again is not None:
                again()

        return undo

    def recording(self, results: Results | None) -> AbstractContextManager[None]:
        """Inside, what attention kernels give is put into ``results``, where there are any to be kept."""
        return nullcontext() if results is None or self.attention is None else self.attention.recording(results)

    def answering(self, results: Results | None) -> AbstractContextManager[None]:
        """Inside, attention kernels give what is in ``results``."""
        return nullcontext() if results is None or self.attention is None else self.attention.answering(results)

    def __call__(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], call: LayerCall) -> Tensor:
        """hidden [B, T, D] -> [B, T, D]; ``args`` and ``kwargs`` are those of ``call`` with leaves of the tape in place."""
        self.routed.clear()
        if call.hidden_name is None:
            output = self.run(hidden, *args, **kwargs)
        else:
            output = self.run(*args, **{call.hidden_name: hidden}, **kwargs)
        return hidden_of(output, hidden, call.onward)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return root.get_submodule(path), leaf
