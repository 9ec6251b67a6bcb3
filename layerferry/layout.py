"""Names to offsets inside one unit: the only code that knows where a parameter lies.

A unit is streamed as one piece, so its parameters lie in one flat vector, and every plane of the unit (weight, residue,
gradient, optimizer state) is such a vector with the same order. The vector has at most two typed *sections*: parameters that are
computed with in bf16, whose fp32 master is split into the bf16 weight plane and an int16 residue plane, and parameters
that must stay fp32 (router gates of some families; everything in fp32 mode), which have no residue. Inside a section,
parameters that take weight decay come first, so that a step is at most four contiguous spans, and frozen ones last: only the
weight plane reaches over them, every other plane ends with the trained ones, at the same offsets. Every parameter starts on a
256-byte boundary of the narrowest plane: views into a slot are as aligned as separate allocations would be.

Padding elements between parameters are zero in every plane and stay zero under every optimizer.
Checked by ``tests/test_layout.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

ALIGN_ELEMENTS = 128
"""Parameters start at multiples of this many elements: 256 bytes in the narrowest (2-byte) plane."""

STACK_BYTES = 256
"""Planes that lie in one buffer start at multiples of this."""

SECTION_DTYPES = (torch.bfloat16, torch.float32)
"""Order of the typed sections inside every plane."""

WEIGHT = "weight"
RESIDUE = "residue"
GRAD = "grad"

MATRICES, OTHERS = "matrices", "others"
"""What a plane may be for: parameters that are matrices of decoder layers, all others."""

BLOCK_ELEMENTS = ALIGN_ELEMENTS
"""Elements that share an exponent in a plane of 8-bit codes. No block reaches over a parameter, so no plan changes a code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter inside a unit. ``offset`` and ``numel`` count elements inside the section of ``dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    decays: bool
    trained: bool = True
    matrix: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def padded_numel(self) -> int:
        """With the padding behind it, up to where the next parameter may begin."""
        return _aligned(self.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """What a layout needs to know of a parameter: ``dtype`` is what the device computes with, bf16 or fp32."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    decays: bool = True
    trained: bool = True
    """False: frozen. It has a weight and nothing else."""
    matrix: bool = False
    """A matrix of a decoder layer, or a stack of them (experts): its last two dimensions. Muon steps these otherwise."""

    @property
    def has_matrices(self) -> bool:
        """By shape and name. Biases of experts have two dimensions too, and do not decay; depthwise convolutions have three, of
        which one of the last two is 1."""
        return self.decays and len(self.shape) > 1 and min(self.shape[-2:]) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A contiguous run of one section whose parameters are stepped alike; ``start`` and ``stop`` count elements."""

    dtype: torch.dtype
    start: int
    stop: int
    decays: bool


@dataclass(frozen=True)
class Layout:
    """Frozen map of one unit: entries in plane order, and the padded length of each section in elements.

    ``trained_numel`` is what of ``section_numel`` the trained parameters take, which come first; ``spans`` cover just that.
    """

    entries: tuple[Entry, ...]
    section_numel: tuple[int, int]
    trained_numel: tuple[int, int]
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, parameters: Iterable[ParameterSpec]) -> Layout:
        """Lay parameters out: sections in the order of ``SECTION_DTYPES``; in each the decayed ones, the other trained ones,
        the frozen ones; given order kept."""
        given = tuple(parameters)
        entries: list[Entry] = []
        spans: list[Span] = []
        section_numel: list[int] = []
        trained_numel: list[int] = []
        for dtype in SECTION_DTYPES:
            cursor = 0
            for trained, decays in ((True, True), (True, False), (False, False)):
                start = cursor
                if not trained:
                    trained_numel.append(cursor)
                for spec in given:
                    if spec.dtype == dtype and spec.trained == trained and (spec.decays and trained) == decays:
                        shape = tuple(spec.shape)
                        kind = {"decays": decays, "trained": trained, "matrix": spec.matrix}
                        entry = Entry(name=spec.name, shape=shape, dtype=dtype, offset=cursor, **kind)
                        entries.append(entry)
                        cursor += entry.padded_numel
                if trained and cursor > start:
                    spans.append(Span(dtype=dtype, start=start, stop=cursor, decays=decays))
            section_numel.append(cursor)
        assert len(entries) == len(given), "a parameter has a dtype without a section"
        return cls(
            entries=tuple(entries),
            section_numel=(section_numel[0], section_numel[1]),
            trained_numel=(trained_numel[0], trained_numel[1]),
            spans=tuple(spans),
        )

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def numel(self) -> int:
        """Parameters of the unit, padding not counted: the P of bytes per parameter."""
        return sum(entry.numel for entry in self.entries)

    @cached_property
    def num_trained(self) -> int:
        """Parameters of the unit that are trained."""
        return sum(entry.numel for entry in self.entries if entry.trained)

    @cached_property
    def num_in_matrices(self) -> int:
        """Of ``num_trained``, those in matrices."""
        return sum(entry.numel for entry in self.entries if entry.trained and entry.matrix)

    def numel_in(self, plane: PlaneSpec) -> tuple[int, int]:
        """Elements of each section of one plane of this unit, padding included."""
        if not plane.packed:
            return self.section_numel if plane.frozen else self.trained_numel
        lengths = dict.fromkeys(SECTION_DTYPES, 0)
        for entry in self.entries:
            lengths[entry.dtype] += _aligned(prod(plane.shape(entry))) if plane.takes(entry) else 0
        return lengths[torch.bfloat16], lengths[torch.float32]

    def place(self, entry: Entry, plane: PlaneSpec) -> slice | None:
        """Bytes of ``entry``, padding included, in one plane of this unit; None where the plane does not hold it."""
        assert not plane.coded and not plane.packed, "codes and their exponents lie apart, packed planes have places of their own"
        if not plane.takes(entry):
            return None
        begin = 0
        for section, numel, dtype in zip(SECTION_DTYPES, self.numel_in(plane), plane.dtypes, strict=True):
            if section == entry.dtype:
                size = 0 if dtype is None else dtype.itemsize
                start = begin + entry.offset * size
                return slice(start, start + entry.padded_numel * size) if size else None
            begin += plane.section_bytes(numel, dtype)
        raise AssertionError("a parameter has a dtype without a section")

    def bytes(self, plane: PlaneSpec) -> int:
        """Bytes of one plane of this unit."""
        return sum(plane.section_bytes(numel, dtype) for numel, dtype in zip(self.numel_in(plane), plane.dtypes, strict=True))

    def stack(self, planes: Mapping[str, PlaneSpec]) -> dict[str, slice]:
        """Bytes of several planes of this unit in one buffer, each from a multiple of ``STACK_BYTES``."""
        found, begin = {}, 0
        for kind, plane in planes.items():
            found[kind] = slice(begin, begin + self.bytes(plane))
            begin = round_up(found[kind].stop, STACK_BYTES)
        return found

    def offset(self, entry: Entry, plane: PlaneSpec) -> int:
        """Where ``entry`` begins in its section of one plane."""
        if not plane.packed:
            return entry.offset
        before = (other for other in self.entries[: self.entries.index(entry)] if other.dtype == entry.dtype)
        return sum(_aligned(prod(plane.shape(other))) for other in before if plane.takes(other))


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """Element types of a plane, one per section of ``SECTION_DTYPES``; None where the plane has no such section.

    ``coded``: elements are 8-bit codes, and behind each section lies one exponent byte per ``BLOCK_ELEMENTS``. ``frozen``: frozen
    parameters have elements in it too; of all planes only the weights.
    ``side``: row or column, a number for each row or column of a parameter's matrices; a vector has all its numbers in the rows.
    ``only``: the parameters that it is for, matrices or others; None: all.
    """

    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    coded: bool = False
    frozen: bool = False
    side: str | None = None
    only: str | None = None

    @property
    def packed(self) -> bool:
        """Whether its parameters lie closer together than in the other planes, at offsets of their own."""
        return self.side is not None or self.only is not None

    def takes(self, entry: Entry) -> bool:
        """Whether it is for this parameter."""
        return (entry.trained or self.frozen) and (self.only is None or (self.only == MATRICES) == entry.matrix)

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """Of what the plane holds for one parameter."""
        if self.side is None:
            return entry.shape
        if len(entry.shape) < 2:
            return (1, entry.numel if self.side == "row" else 0)
        height, width = entry.shape[-2:]
        return (entry.numel // (height * width), height if self.side == "row" else width)

    def section_bytes(self, numel: int, dtype: torch.dtype | None) -> int:
        """Of ``numel`` elements, whole blocks."""
        return 0 if dtype is None else numel * dtype.itemsize + (numel // BLOCK_ELEMENTS if self.coded else 0)


WEIGHT_PLANE = PlaneSpec((torch.bfloat16, torch.float32), frozen=True)
RESIDUE_PLANE = PlaneSpec((torch.int16, None))
RESIDUE8_PLANE = PlaneSpec((torch.int8, None))
"""The next 8 bits below the bf16 weight: a master of 24 bits."""
NO_PLANE = PlaneSpec((None, None))
ROW_PLANE, COLUMN_PLANE = (PlaneSpec((torch.float32, torch.float32), side=side) for side in ("row", "column"))
CODES_PLANE = PlaneSpec((torch.uint8, torch.uint8), coded=True)
GRAD_PLANE = PlaneSpec((torch.bfloat16, torch.float32))
FP32_PLANE = PlaneSpec((torch.float32, torch.float32))


class Plane:
    """One plane of one unit over a flat byte buffer: typed section views, parameter views, spans.

    ``buffer`` is a uint8 tensor [>= layout.bytes(spec)] at any place (host plane, slot, slab, accumulator); the plane owns no
    memory.
    """

    __slots__ = ("buffer", "exponents", "layout", "sections", "spec")

    def __init__(self, layout: Layout, spec: PlaneSpec, buffer: Tensor) -> None:
        needed = layout.bytes(spec)
        assert buffer.dtype == torch.uint8 and buffer.numel() >= needed, "buffer too small for its plane"
        self.layout = layout
        self.spec = spec
        self.buffer = buffer[:needed]
        self.sections: dict[torch.dtype, Tensor] = {}
        self.exponents: dict[torch.dtype, Tensor] = {}
        cursor = 0
        for section, numel, dtype in zip(SECTION_DTYPES, layout.numel_in(spec), spec.dtypes, strict=True):
            if dtype is not None and (numel or self._takes_any(section)):
                elements, end = cursor + numel * dtype.itemsize, cursor + spec.section_bytes(numel, dtype)
                self.sections[section] = self.buffer[cursor:elements].view(dtype)
                if spec.coded:
                    self.exponents[section] = self.buffer[elements:end]
                cursor = end

    def _takes_any(self, section: torch.dtype) -> bool:
        """TRAP: of vectors a plane of columns has no numbers, and is for them all the same: where nothing else of a section is
        trained, the section is empty, not missing (tests/checkpoint/test_formats.py)."""
        return any(entry.dtype == section and self.spec.takes(entry) for entry in self.layout.entries)

    def span(self, span: Span) -> Tensor | None:
        """The elements of ``span``, or None where the plane has no such section."""
        assert not self.spec.packed
        section = self.sections.get(span.dtype)
        return None if section is None else section[span.start : span.stop]

    def span_exponents(self, span: Span) -> Tensor | None:
        """The exponents of the blocks of ``span``, or None where the plane has none."""
        section = self.exponents.get(span.dtype)
        return None if section is None else section[span.start // BLOCK_ELEMENTS : span.stop // BLOCK_ELEMENTS]

    def exponents_of(self, entry: Entry) -> Tensor:
        """The exponents of the blocks of the parameter ``entry``, [blocks] uint8."""
        first = self.layout.offset(entry, self.spec) // BLOCK_ELEMENTS
        return self.exponents[entry.dtype][first : first + -(-entry.numel // BLOCK_ELEMENTS)]

    def whole_blocks(self, entry: Entry) -> Tensor | None:
        """The elements of ``entry`` and the padding behind them, flat; None where the plane has no such section."""
        assert self.spec.side is None
        section, start = self.sections.get(entry.dtype), self.layout.offset(entry, self.spec)
        return None if section is None else section[start : start + entry.padded_numel]

    def view(self, entry: Entry) -> Tensor:
        """What the plane holds for ``entry``: in the parameter's own shape, or one number for each row or column."""
        shape, start = self.spec.shape(entry), self.layout.offset(entry, self.spec)
        return self.sections[entry.dtype][start : start + prod(shape)].view(shape)

    def holds(self, entry: Entry) -> bool:
        """Whether the parameter has elements in this plane."""
        return entry.dtype in self.sections and self.spec.takes(entry)

    def views(self) -> list[Tensor]:
        """Every parameter that the plane holds, in layout order."""
        return [self.view(entry) for entry in self.layout.entries if self.holds(entry)]

    def tensors(self) -> Sequence[Tensor]:
        return tuple(self.sections.values())


def _aligned(numel: int) -> int:
    return round_up(numel, ALIGN_ELEMENTS)


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below ``number``."""
    return -(-number // multiple) * multiple
