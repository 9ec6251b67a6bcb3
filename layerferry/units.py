"""What is streamed as one piece, and the parts that a unit with large tables may be streamed in.

The prologue (embedding and whatever else runs before the first layer), one unit per decoder layer, and the epilogue (final
norm and head). Where the two ends share a parameter (tied weights) they are one unit, ``ends``, with two uses.
A unit knows the names that its parameters have in the Hugging Face model; nothing else maps between the two.

At home a unit is whole. Only on the way, and on the device, may it be in parts: ranges of rows of its tables, each with a small
layout of its own. Rows of a table are contiguous in every plane, so a part is a few stretches of bytes. The tables of an end go
along the vocabulary; those of a layer are its stacked experts, a row an expert, and what else the layer has, its body, is a part
alone, because it stays on the device while the experts pass. Checked by ``tests/test_units.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import gcd, lcm
from typing import NamedTuple, TypeAlias

from layerferry.layout import ALIGN_ELEMENTS, Entry, Layout, ParameterSpec, PlaneSpec


class Kind(Enum):
    """Pieces that share buffers of one size @device."""

    LAYERS = "layers"
    """Whole layers, and bodies of layers whose experts travel in parts."""
    ENDS = "ends"
    EXPERTS = "experts"


Buffers: TypeAlias = tuple[int, Kind]
"""What the buffers that a piece uses are known by: its unit's index, and its kind."""


class Stretch(NamedTuple):
    """Bytes that lie together both at home and in a piece's buffer."""

    at_home: slice
    in_piece: slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """One streamed piece: ``index`` is its place in the store, ``names`` maps layout entry name to model parameter name."""

    name: str
    index: int
    layout: Layout
    names: dict[str, str]
    is_layer: bool
    tables: tuple[str, ...] = ()
    """Entries along the vocabulary, or along a layer's experts, whose rows can be used apart from each other; none: the unit only
    travels whole."""
    _parts: dict[int, tuple[Piece, ...]] = field(default_factory=dict, init=False, repr=False)
    """What ``divide`` has made of it, by the number of parts that were wanted."""

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def num_trained(self) -> int:
        """Parameters that are trained; 0: the unit is frozen, and has neither gradient nor optimizer state."""
        return self.layout.num_trained

    @property
    def stream(self) -> int:
        """A number of its own, whatever the plan: the random numbers of its updates."""
        return zlib.crc32(self.names[self.layout.entries[0].name].encode())

    @property
    def unit(self) -> Unit:
        """Itself: a whole unit is a piece like its parts are."""
        return self

    @property
    def number(self) -> int:
        return 0

    @property
    def kind(self) -> Kind:
        return Kind.LAYERS if self.is_layer else Kind.ENDS

    @property
    def buffers(self) -> Buffers:
        """What the buffers that it uses are known by."""
        return self.index, self.kind

    def stretches(self, spec: PlaneSpec) -> list[Stretch]:
        """Where its bytes lie in the unit's plane of ``spec``, and in a buffer of its own."""
        everything = slice(0, self.layout.bytes(spec))
        return [Stretch(everything, everything)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far down the backward goes."""

    trains_prologue: bool
    """All the way: something that runs before the first layer is trained."""
    num_below: int
    """Layers below everything that is trained: the backward never comes there."""
    lowest: int | None
    """Index of the unit with which it ends, where that is a layer."""

    @classmethod
    def of(cls, layers: Sequence[Unit], *, trains_prologue: bool) -> Reach:
        trained = [number for number, unit in enumerate(layers) if unit.num_trained]
        num_below = 0 if trains_prologue else trained[0] if trained else len(layers)
        lowest = None if trains_prologue or not trained else layers[num_below].index
        return cls(trains_prologue=trains_prologue, num_below=num_below, lowest=lowest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Rows of a unit's tables. Part 0 also has all parameters of the unit that are no tables; of a layer it has nothing else."""

    unit: Unit
    number: int
    layout: Layout
    rows: Mapping[str, range]
    """Of each table of which there is something in this part."""

    @property
    def name(self) -> str:
        return f"{self.unit.name} part {self.number}"

    @property
    def index(self) -> int:
        return self.unit.index

    @property
    def kind(self) -> Kind:
        return Kind.EXPERTS if self.unit.is_layer and self.number else self.unit.kind

    @property
    def buffers(self) -> Buffers:
        return self.index, self.kind

    @property
    def names(self) -> dict[str, str]:
        return self.unit.names

    @property
    def num_trained(self) -> int:
        return self.layout.num_trained

    def stretches(self, spec: PlaneSpec) -> list[Stretch]:
        """Where its bytes lie in the unit's plane of ``spec``, and in a buffer of its own; padding travels along."""
        found: list[Stretch] = []
        for entry in self.layout.entries:
            own = self.layout.place(entry, spec)
            if own is None:
                continue
            whole = self.unit.layout.by_name[entry.name]
            home = self.unit.layout.place(whole, spec)
            assert home is not None
            num_bytes = own.stop - own.start
            skipped = self.rows[entry.name].start * _row(whole) if entry.name in self.rows else 0
            begin = home.start + skipped * (num_bytes // entry.padded_numel)
            at_home = slice(begin, begin + num_bytes)
            if found and (found[-1].at_home.stop, found[-1].in_piece.stop) == (at_home.start, own.start):
                last = found.pop()
                at_home, own = slice(last.at_home.start, at_home.stop), slice(last.in_piece.start, own.stop)
            found.append(Stretch(at_home, own))
        return found


Piece: TypeAlias = Unit | Part
"""What travels at a time."""


def divide(unit: Unit, count: int) -> tuple[Piece, ...]:
    """``unit`` in at most ``count`` parts of about as many rows, and before them a layer's body; itself alone where it has no
    tables, or few rows. The same parts every time: they are told apart by identity, as units are."""
    if count == 1 or not unit.tables:
        return (unit,)
    if count not in unit._parts:
        unit._parts[count] = _divided(unit, count)
    return unit._parts[count]


def _divided(unit: Unit, count: int) -> tuple[Piece, ...]:
    tables = [unit.layout.by_name[name] for name in unit.tables]
    # every part begins where a parameter may begin: its padding is then the table's own, or none
    multiple = lcm(*(ALIGN_ELEMENTS // gcd(_row(table), ALIGN_ELEMENTS) for table in tables))
    height = {table.name: multiple * -(-table.shape[0] // (count * multiple)) for table in tables}
    needed = max(-(-table.shape[0] // height[table.name]) for table in tables)
    bodies = int(unit.is_layer)
    return tuple(_part(unit, number, number - bodies, height) for number in range(needed + bodies)) if needed > 1 else (unit,)


def _part(unit: Unit, number: int, place: int, height: Mapping[str, int]) -> Part:
    """``place`` among the parts that have rows; -1: a body."""
    rows: dict[str, range] = {}
    specs = []
    for entry in unit.layout.entries:
        shape = entry.shape
        if entry.name in height:
            begin = place * height[entry.name]
            own = range(begin, min(begin + height[entry.name], entry.shape[0]))
            if place < 0 or not own:
                continue
            rows[entry.name], shape = own, (len(own), *entry.shape[1:])
        elif number:
            continue
        kind = {"decays": entry.decays, "trained": entry.trained, "matrix": entry.matrix}
        specs.append(ParameterSpec(name=entry.name, shape=shape, dtype=entry.dtype, **kind))
    return Part(unit=unit, number=number, layout=Layout.of(specs), rows=rows)


def _row(table: Entry) -> int:
    """Elements of one row."""
    return table.numel // table.shape[0]
