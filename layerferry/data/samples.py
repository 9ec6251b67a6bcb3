"""A data set's tokens, compactly: three flat int32 vectors and offsets instead of millions of Python lists.

A billion tokens are 8 GB (ids and labels), 12 with positions; lists of Python ints would be an order of magnitude more.
Checked by ``tests/data/test_samples.py``.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row: T tokens @host. ``labels``, not shifted, is -100 where nothing is trained; ``position_ids`` only if packed."""

    input_ids: Ids  # [T]
    labels: Ids  # [T]
    position_ids: Ids | None = None  # [T]
    sample_id: int = 0
    isolated: bool = False

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row while it is being built: plain lists, before it is stored."""

    input_ids: list[int]
    labels: list[int]
    position_ids: list[int] | None = None


class SampleSet(Sequence[Sample]):
    """An immutable sequence of samples over flat storage; the sample id is the index."""

    def __init__(self, rows: Iterator[Row], *, isolated: bool = False) -> None:
        ids, labels, positions, offsets = array("i"), array("i"), array("i"), array("q", [0])
        for row in rows:
            ids.extend(row.input_ids)
            labels.extend(row.labels)
            positions.extend(row.position_ids or ())
            offsets.append(len(ids))
        assert len(ids) == len(labels) and len(positions) in (0, len(ids))
        self.isolated = isolated
        self.offsets = np.array(offsets, dtype=np.int64)
        self.ids, self.labels = _frozen(ids), _frozen(labels)
        self.positions = _frozen(positions) if positions else None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        span = slice(self.offsets[index], self.offsets[index + 1])
        positions = None if self.positions is None else self.positions[span]
        return Sample(
            input_ids=self.ids[span], labels=self.labels[span], position_ids=positions, sample_id=index, isolated=self.isolated
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @cached_property
    def fingerprint(self) -> int:
        """Of all that a row is made of: ids, labels, positions, and where it ends. A second for 250 million tokens, once."""
        found = zlib.crc32(self.offsets.tobytes(), int(self.isolated))
        for values in (self.ids, self.labels, self.positions):
            if values is not None:
                found = zlib.crc32(np.ascontiguousarray(values).data, found)
        return found

    def state(self) -> dict[str, Any]:
        """Arrays by name, for ``tokenized_path``; ``of_state`` is its inverse."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in ("ids", "labels", "offsets")}
        arrays["isolated"] = np.array(self.isolated)
        return arrays if self.positions is None else arrays | {"positions": self.positions}

    @classmethod
    def of_state(cls, arrays: dict[str, Any]) -> SampleSet:
        found = cls(iter(()), isolated=bool(arrays["isolated"]))
        found.ids, found.labels, found.offsets = arrays["ids"], arrays["labels"], arrays["offsets"]
        found.positions = arrays.get("positions")
        return found


def _frozen(values: array[int]) -> Ids:
    found = np.array(values, dtype=np.int32)
    found.flags.writeable = False
    return found
