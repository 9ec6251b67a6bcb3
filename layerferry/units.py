"""What is streamed as one piece.

The prologue (embedding and whatever else runs before the first layer), one unit per decoder layer, and the epilogue (final
norm and head). Where the two ends share a parameter (tied weights) they are one unit, ``ends``, with two uses.
A unit knows the names that its parameters have in the Hugging Face model; nothing else maps between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from layerferry.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One streamed piece: ``index`` is its place in the store, ``names`` maps layout entry name to model parameter name."""

    name: str
    index: int
    layout: Layout
    names: dict[str, str]
    is_layer: bool

    @property
    def numel(self) -> int:
        return self.layout.numel
