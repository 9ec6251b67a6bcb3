"""What a checkpoint of an engine consists of: files, their headers and bytes, known before anything is written.

A *piece* is what can be written while nothing but its own units stands still: nearly always one unit. It has two files: the
unit's Hugging Face shard, whose bf16 weights are the high halves of the fp32 masters (and fp32 where the device computes
in fp32), and the state that the shard cannot hold: ``residue.<parameter>`` and the optimizer's planes,
``exp_avg.<parameter>`` (with ``exp_avg_exponents.<parameter>`` where they are 8-bit codes). So nothing is written twice: 12 of
the 14 bytes a parameter that training holds, the gradient being no state between steps. Names are the model's, never offsets:
the plan leaves no trace.
Checked by ``tests/checkpoint/test_exact.py`` and ``tests/checkpoint/test_save.py``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from layerferry.engine.engine import Engine
from layerferry.layout import BLOCK_ELEMENTS, RESIDUE, WEIGHT, Entry, Plane
from layerferry.store.safetensors_file import DTYPES
from layerferry.store.safetensors_writer import TensorToWrite, header_of
from layerferry.units import Unit

ELEMENT_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SEPARATOR = "."
CODES = f"U8/{BLOCK_ELEMENTS}"
"""Element type of a plane of codes (``optim/blocks.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToWrite:
    """One safetensors file; its tensors are made when their turn comes."""

    name: str
    header: bytes
    tensors: tuple[TensorToWrite, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Files that are written together, and the units that they are read from."""

    units: tuple[Unit, ...]
    files: tuple[FileToWrite, ...]
    conversions: tuple[Conversion, ...]

    def forget(self) -> None:
        """Let go of what was made for this checkpoint. TRAP: what stays would be written into the next one
        (tests/checkpoint/test_exact.py)."""
        for conversion in self.conversions:
            conversion.forget()


class Conversion:
    """Tensors that are made together from a unit's parameters: by the thread that asks first, and kept until the piece is
    written, for a tensor may be written by several threads."""

    def __init__(self, make: Callable[[], dict[str, Tensor]]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: dict[str, Tensor] | None = None

    def tensor(self, name: str) -> Tensor:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made[name]

    def forget(self) -> None:
        with self._lock:
            self._made = None


class Contents:
    """The files of every checkpoint of ``engine``. ``seen`` is written by the thread that saves."""

    def __init__(self, engine: Engine, *, model_only: bool) -> None:
        self._engine = engine
        self._seen: dict[int, Mapping[str, Plane]] = {}
        self._homes = {unit.names[entry.name]: (unit, entry) for unit in engine.store.units for entry in unit.layout.entries}
        weights = self._weights()
        names = [f"{number:05d}-of-{len(weights):05d}.safetensors" for number in range(1, len(weights) + 1)]
        pieces, weight_map = [], {}
        for name, (units, tensors, conversions) in zip(names, weights, strict=True):
            weight_map.update({tensor.name: f"model-{name}" for tensor in tensors})
            files = [_file(f"model-{name}", tensors)]
            if not model_only:
                files.append(_file(f"state-{name}", [tensor for unit in units for tensor in self._state(unit)]))
            pieces.append(Piece(units=units, files=tuple(files), conversions=tuple(conversions)))
        self.pieces = tuple(pieces)
        total_bytes = sum(tensor.num_bytes for _, tensors, _ in weights for tensor in tensors)
        metadata = {"total_size": total_bytes, "total_parameters": engine.num_params}
        self.index = (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()
        """``model.safetensors.index.json``: what transformers looks for."""
        self.model_bytes = total_bytes
        self.num_bytes = sum(file.num_bytes for piece in pieces for file in piece.files) + len(self.index)

    @contextmanager
    def seen(self, unit: Unit, planes: Mapping[str, Plane]) -> Iterator[None]:
        """Inside, tensors of ``unit`` are made from ``planes``, which are @host."""
        self._seen[unit.index] = planes
        try:
            yield
        finally:
            del self._seen[unit.index]

    def _weights(self) -> list[tuple[tuple[Unit, ...], list[TensorToWrite], list[Conversion]]]:
        """What transformers loads, unit by unit in the order of updates; units that are converted together stay together."""
        order = self._engine.update_order
        owner = {unit.index: unit.index for unit in order}

        def root(index: int) -> int:
            while owner[index] != index:
                index = owner[index]
            return index

        found = []
        for names, tensors, make in self._engine.folder.pieces(self._outline):
            units = [self._homes[name][0].index for name in names if name in self._homes] or [order[-1].index]
            for index in units[1:]:
                owner[root(index)] = root(units[0])
            made = Conversion(make)
            found.append((units[0], [one._replace(make=partial(made.tensor, one.name)) for one in tensors], made))
        grouped: dict[int, tuple[list[Unit], list[TensorToWrite], list[Conversion]]] = {}
        for unit in order:
            grouped.setdefault(root(unit.index), ([], [], []))[0].append(unit)
        for index, tensors, made in found:
            grouped[root(index)][1].extend(tensors)
            grouped[root(index)][2].append(made)
        return [
            (tuple(units), sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize), made)  # wide elements first
            for units, tensors, made in grouped.values()
        ]

    def _outline(self, name: str) -> Tensor:
        """A parameter as it will be written: read from the planes of the unit that is seen, from the store for its shape."""
        if name not in self._homes:
            return self._engine.skeleton.get_buffer(name).cpu()
        unit, entry = self._homes[name]
        planes = self._seen.get(unit.index) or self._engine.store.planes(unit)
        return planes[WEIGHT].view(entry)

    def _state(self, unit: Unit) -> Iterator[TensorToWrite]:
        """Residue and optimizer planes of one unit, in the planes' own order; the widest elements first."""
        planes = self._engine.store.planes(unit)
        kinds = dict.fromkeys((*self._engine.optimizer.state_planes, RESIDUE))
        for kind in sorted(kinds, key=lambda kind: -max((plane.dtype.itemsize for plane in planes[kind].tensors()), default=0)):
            for entry in unit.layout.entries:
                if planes[kind].holds(entry):
                    dtype = planes[kind].sections[entry.dtype].dtype
                    name = SEPARATOR.join((kind, unit.names[entry.name]))
                    shape = planes[kind].spec.shape(entry)
                    yield TensorToWrite(name, shape, dtype, Maker(self._seen, unit.index, kind, entry, Plane.view))
                if planes[kind].spec.coded and planes[kind].holds(entry):
                    name = SEPARATOR.join((exponents_of(kind), unit.names[entry.name]))
                    maker = Maker(self._seen, unit.index, kind, entry, Plane.exponents_of)
                    yield TensorToWrite(name, (-(-entry.numel // BLOCK_ELEMENTS),), torch.uint8, maker)


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes one tensor of the state: what ``read`` (``Plane.view``, ``Plane.exponents_of``) gives of the planes that are seen by
    the time it is asked."""

    seen: Mapping[int, Mapping[str, Plane]]
    unit: int
    kind: str
    entry: Entry
    read: Callable[[Plane, Entry], Tensor]

    def __call__(self) -> Tensor:
        return self.read(self.seen[self.unit][self.kind], self.entry)


def exponents_of(kind: str) -> str:
    """What the exponents of a plane of codes are called in a file."""
    return f"{kind}_exponents"


def element_names(engine: Engine) -> dict[str, str]:
    """Element types of the optimizer's moments, as safetensors calls them; codes with the size of their blocks. The residue is
    not among them: whatever bits of a master a file has can be taken."""
    found = {}
    for kind, spec in engine.optimizer.state_planes.items():
        if kind != RESIDUE:
            names = "+".join(sorted({ELEMENT_NAMES[dtype] for dtype in spec.dtypes if dtype is not None}))
            found[kind] = CODES if spec.coded else names
    return found


def trained_names(engine: Engine) -> tuple[str, ...]:
    """What the optimizer changes, by the model's names."""
    return tuple(sorted(unit.names[entry.name] for unit in engine.store.units for entry in unit.layout.entries if entry.trained))


def _file(name: str, tensors: list[TensorToWrite]) -> FileToWrite:
    return FileToWrite(name=name, header=header_of(tensors, {"format": "pt"}), tensors=tuple(tensors))
