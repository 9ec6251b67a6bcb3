"""The decoder layers inside a Hugging Face model, and the stubs that stand in for them.

With stubs in their places the model's own forward becomes our prologue (stopped at the last stub, it has shown every
layer's inputs) and our epilogue (the last stub hands our hidden states back, and the family's own final norm, head and
soft-caps follow). No attribute tables, no per-family forward. Checked by ``tests/models`` and by the conformance suite.
"""

from __future__ import annotations

from collections.abc import Callable
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


def find_stack(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers: the ``ModuleList`` of ``num_layers`` entries with the most parameters."""
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            count = sum(parameter.numel() for parameter in module.parameters())
            if count and (best is None or count > best[0]):
                best = (count, name, module)
    if best is None:
        raise ModelRefused(f"{type(model).__name__}: no list of {num_layers} layers found to stream")
    return best[1], best[2]


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
    on_last: Callable[[], None] | None = None

    def reset(self) -> None:
        self.injected = self.first_hidden = self.last_returned = None
        self.calls = []

    def play(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden_name = None if args else "hidden_states"
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if index == 0:
            self.first_hidden = hidden
        elif hidden is not self.last_returned:
            raise ModelRefused("hidden states are changed between the layers, outside any layer")
        if self.injected is None:
            self.calls.append(LayerCall(args[1:], kwargs, hidden_name))
            if index == self.num_layers - 1:
                raise StopForward
        elif index == self.num_layers - 1:
            torch.set_grad_enabled(True)  # what ran before is a dummy; the skeleton restores the mode
            hidden = self.injected
        self.last_returned = hidden
        return (hidden, *(None,) * (self.tuple_length - 1)) if self.tuple_length else hidden


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


def hidden_of(output: Any, like: Tensor) -> Tensor:
    """The hidden states among what a layer returned: families return a tensor, or tuples of different lengths."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        for item in output:
            if isinstance(item, Tensor) and item.shape == like.shape and item.is_floating_point():
                return item
    raise ModelRefused(f"a layer returned {type(output).__name__} without hidden states of shape {tuple(like.shape)}")
