"""The paper: weights stream in, gradients stream out, updates hide in the next forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerferry.engine.engine import Engine as Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(name)
    from layerferry.engine.engine import Engine

    return Engine
