"""Reading autograd graphs and nested arguments: which leaves lie under a tensor, which tensors inside a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def leaf_names(outputs: list[Tensor], names: dict[int, str]) -> set[str]:
    """Names of the parameters under ``outputs`` in the autograd graph."""
    return {names[id(leaf)] for leaf in graph_leaves(outputs) if id(leaf) in names}


def graph_leaves(outputs: list[Tensor]) -> list[Tensor]:
    """Every leaf that requires grad under ``outputs``."""
    found = [t for t in outputs if t.requires_grad and t.grad_fn is None]
    stack: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return found
