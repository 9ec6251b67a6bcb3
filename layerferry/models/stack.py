"""The decoder layers inside a Hugging Face model, and the stubs that stand in for them.

With stubs in their places the model's own forward becomes our prologue (stopped at the last stub, it has shown every
layer's inputs) and our epilogue (the last stub hands our hidden states back, and the family's own final norm, head and
soft-caps follow). No attribute tables, no per-family forward. Checked by ``tests/models`` and by the conformance suite.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from layerferry.errors import ModelRefused


class StopForward(Exception):
    """Thrown by a stub that has seen enough; never leaves the skeleton."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What the model's forward gave one layer besides its hidden states, which go in first or as ``hidden_name``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_name: str | None
    onward: frozenset[int] | set[int] = frozenset()
    """Places in a layer's output, besides the hidden states, that the model hands to the next layer."""


def find_stack(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers: the ``ModuleList`` with as many entries as ``config`` says, and the most parameters.

    Some configs count twice: longcat_flash has ``num_layers`` layers of two attentions each.
    """
    text = config.get_text_config()
    depths = {getattr(text, name, None) for name in ("num_hidden_layers", "num_layers")}
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) in depths:
            count = sum(parameter.numel() for parameter in module.parameters())
            if count and (best is None or count > best[0]):
                best = (count, name, module)
    if best is None:
        raise ModelRefused(f"{type(model).__name__}: no list of {text.num_hidden_layers} layers found to stream")
    return best[1], best[2]


@dataclass(frozen=True, slots=True)
class Extra:
    """Stands for what a layer returns besides its hidden states; seen again at a later layer, it is state handed on."""

    place: int


@dataclass
class StubScript:
    """What the stubs do in the present forward. Written by the skeleton only."""

    num_layers: int
    tuple_length: int = 0
    """What the model expects of a layer: 0 a tensor, else a tuple that begins with the hidden states."""
    injected: Tensor | None = None
    first_hidden: Tensor | None = None
    last_returned: Tensor | None = None
    calls: list[LayerCall] = field(default_factory=list)
    onward: set[int] = field(default_factory=set)
    probes: list[Tensor] | None = None
    """Where a list: each stub but the last answers with NaN of its own, collected here, so that every use of them shows."""

    def reset(self) -> None:
        self.injected = self.first_hidden = self.last_returned = None
        self.calls = []

    def play(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden_name = None if args else "hidden_states"
        hidden = args[0] if args else kwargs.pop("hidden_states")
        args = tuple(self._without_extra(value) for value in args)
        kwargs = {name: self._without_extra(value) for name, value in kwargs.items()}
        if index == 0:
            self.first_hidden = hidden
        elif hidden is not self.last_returned:
            raise ModelRefused("hidden states are changed between the layers, outside any layer")
        if self.injected is None:
            self.calls.append(LayerCall(args[1:], kwargs, hidden_name, self.onward))
            if index == self.num_layers - 1:
                raise StopForward
        elif index == self.num_layers - 1:
            torch.set_grad_enabled(True)  # what ran before is a dummy; the skeleton restores the mode
            hidden = self.injected
        if self.probes is not None and index < self.num_layers - 1:
            hidden = torch.full_like(hidden, torch.nan).requires_grad_(torch.is_grad_enabled())
            self.probes.append(hidden)
        self.last_returned = hidden
        return (hidden, *(Extra(place) for place in range(1, self.tuple_length))) if self.tuple_length else hidden

    def _without_extra(self, value: Any) -> Any:
        """None for an ``Extra``, whose place is remembered in ``onward``; any other ``value`` as it is."""
        if isinstance(value, Extra):
            self.onward.add(value.place)
            return None
        return value


class Stub(nn.Module):
    """Stands where a decoder layer stood; plain attributes (layer type, window) are still those of the layer."""

    def __init__(self, layer: nn.Module, index: int, script: StubScript) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_script", script)
        self.index = index

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        script: StubScript = object.__getattribute__(self, "_script")
        return script.play(self.index, args, dict(kwargs))


def hidden_of(output: Any, like: Tensor, onward: Collection[int] = ()) -> Tensor:
    """The hidden states among what a layer returned: families return a tensor, or tuples of different lengths."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        if any(place < len(output) and output[place] is not None for place in onward):
            raise ModelRefused("layers hand each other state besides the hidden states: they cannot be streamed alone")
        for item in output:
            if isinstance(item, Tensor) and item.shape == like.shape and item.is_floating_point():
                return item
    raise ModelRefused(f"a layer returned {type(output).__name__} without hidden states of shape {tuple(like.shape)}")
