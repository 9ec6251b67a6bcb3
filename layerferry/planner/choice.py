"""What is searched for: the fields of a plan that a question leaves open, small enough to be made by the thousand.

``search.py`` makes choices and ``books.py`` furnishes them. Checked by ``tests/planner/test_search.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from layerferry.plan import Plan


class Choice(NamedTuple):
    """The fields of a plan that are searched for, by the plan's own names, and three that only the search knows.
    ``Books.furnished`` counts what fills the device: ``home`` units at home and ``richer_layers`` that keep ``richer_budget``
    (0.0: none may), the one or the other first."""

    micro_batch_rows: int
    num_waves: int
    activation_budget: float
    chunk_tokens: int
    num_slots: int
    num_slabs: int
    resident_gradients: bool
    carry_fp32: bool
    end_parts: int = 1
    expert_parts: int = 1
    richer_layers: int = 0
    host_inputs: int = 0
    on_disk: tuple[int, ...] = ()
    mlp_chunk_tokens: int = 0
    kept_attention: int = 0
    turn_layers: int = 0
    """``num_slots`` counts theirs."""
    first_wave: int = 0
    home: int = 0
    """Units, from the first on, that live @device."""
    richer_budget: float = 0.0
    turns: bool = False
    """As many layers as fit turn with the head."""
    before_home: bool = False
    """Layers that keep more, or turn, come before units at home."""

    @property
    def plain(self) -> Choice:
        """Without layers that may keep more or turn."""
        return Choice(*self[:-3])

    @property
    def may_favour(self) -> bool:
        """Whether some layers may keep more, or turn."""
        return self.turns or self.richer_budget > 0.0

    @property
    def cut(self) -> tuple[int, int, int]:
        """How a step is cut into waves of micro-batches."""
        return (self.micro_batch_rows, self.num_waves, self.first_wave)

    @property
    def computed(self) -> tuple[float, int, int]:
        """What a micro-batch is computed with: share of activations kept, chunks of logits and of token-wise parts."""
        return (self.activation_budget, self.chunk_tokens, self.mlp_chunk_tokens)

    @property
    def in_layers(self) -> tuple[int, int, int]:
        """Numbers of layers that keep other things than the rest do."""
        return (self.host_inputs, self.kept_attention, self.turn_layers)

    def on(self, base: Plan) -> Plan:
        """``base`` with this choice, without bytes and seconds."""
        fields: dict[str, Any] = {
            name: value for name, value in zip(self._fields, self, strict=True) if name not in _OF_THE_SEARCH
        }
        fields["richer_budget"] = self.richer_budget if self.richer_layers else 1.0
        return replace(base, on_device=tuple(range(self.home)), **fields)


_OF_THE_SEARCH = frozenset(("home", "turns", "before_home"))
"""Fields of a choice that a plan has not."""
