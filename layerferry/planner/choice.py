"""What is searched for: the fields of a plan that a question leaves open, small enough to be made by the thousand.

``search.py`` makes choices and ``books.py`` furnishes them. Checked by ``tests/planner/test_search.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from layerferry.plan import Plan


class Choice(NamedTuple):
    """The fields of a plan that are searched for. ``Books.furnished`` counts what fills the device: ``home`` units at home and
    ``richer`` layers that keep ``richer_budget`` (0.0: none may), the one or the other first. ``inputs``: layers whose inputs
    are @host."""

    rows: int
    waves: int
    budget: float
    chunk: int
    slots: int
    slabs: int
    resident: bool
    carry: bool
    parts: int = 1
    home: int = 0
    richer: int = 0
    inputs: int = 0
    disk: tuple[int, ...] = ()
    """Indexes of the units whose state is @disk."""
    mlp_chunk: int = 0
    attention: int = 0
    turn: int = 0
    """Layers that turn with the head; ``slots`` counts theirs."""
    first: int = 0
    """Micro-batches of the first wave; 0: as many as of others."""
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

    def on(self, base: Plan) -> Plan:
        """``base`` with this choice, without bytes and seconds."""
        return replace(
            base,
            micro_batch_rows=self.rows,
            num_waves=self.waves,
            first_wave=self.first,
            activation_budget=self.budget,
            richer_layers=self.richer,
            richer_budget=self.richer_budget if self.richer else 1.0,
            chunk_tokens=self.chunk,
            num_slots=self.slots,
            num_slabs=self.slabs,
            end_parts=self.parts,
            resident_gradients=self.resident,
            carry_fp32=self.carry,
            on_device=tuple(range(self.home)),
            on_disk=self.disk,
            host_inputs=self.inputs,
            mlp_chunk_tokens=self.mlp_chunk,
            kept_attention=self.attention,
            turn_layers=self.turn,
        )
