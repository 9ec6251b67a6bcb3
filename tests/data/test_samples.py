"""Flat storage gives back exactly the rows that went in, and keeps nobody's list."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerferry.data.samples import Row, SampleSet

TOKENS = st.lists(st.integers(0, 200_000), min_size=1, max_size=20)


@given(st.lists(TOKENS, max_size=10), st.booleans())
def test_rows_come_back(rows: list[list[int]], packed: bool) -> None:
    made = [Row(input_ids=ids, labels=[-100, *ids[1:]], position_ids=list(range(len(ids))) if packed else None) for ids in rows]
    found = SampleSet(iter(made), isolated=packed)
    assert len(found) == len(rows)
    assert found.lengths.tolist() == [len(ids) for ids in rows]
    for again in (found, SampleSet.of_state({key: np.array(value) for key, value in found.state().items()})):
        for index, row in enumerate(made):
            sample = again[index]
            assert (sample.sample_id, sample.isolated, len(sample)) == (index, packed, len(row.input_ids))
            assert sample.input_ids.dtype == np.int32
            assert sample.input_ids.tolist() == row.input_ids
            assert sample.labels.tolist() == row.labels
            assert (None if sample.position_ids is None else sample.position_ids.tolist()) == row.position_ids


def test_indexing_as_of_a_sequence() -> None:
    found = SampleSet(Row(input_ids=[n], labels=[n]) for n in range(4))
    assert found[-1].sample_id == 3
    assert [sample.sample_id for sample in found[1:3]] == [1, 2]
    for index in (4, -5):
        with pytest.raises(IndexError):
            found[index]


def test_samples_cannot_be_changed() -> None:
    sample = SampleSet(iter([Row(input_ids=[1], labels=[1])]))[0]
    with pytest.raises(ValueError, match="read-only"):
        sample.input_ids[0] = 2


def test_the_fingerprint_is_of_every_number() -> None:
    """One id, label or position more, less or other, or the border of two rows moved, is another data set; the same rows read
    back are the same one."""
    rows = [
        Row(input_ids=[5, 6, 7], labels=[-100, 6, 7], position_ids=[0, 1, 2]),
        Row(input_ids=[8], labels=[8], position_ids=[0]),
    ]
    first, second = rows

    def of(*made: Row, isolated: bool = False) -> int:
        return SampleSet(iter(made), isolated=isolated).fingerprint

    others = [
        of(replace(first, input_ids=[5, 9, 7]), second),
        of(replace(first, labels=[-100, -100, 7]), second),
        of(replace(first, position_ids=[0, 1, 0]), second),
        of(second, first),
        of(first),
        of(*rows, isolated=True),
        of(
            Row(input_ids=[5, 6], labels=[-100, 6], position_ids=[0, 1]),
            Row(input_ids=[7, 8], labels=[7, 8], position_ids=[2, 0]),
        ),
        of(*(replace(row, position_ids=None) for row in rows)),
    ]
    assert len({of(*rows), *others}) == len(others) + 1
    kept = SampleSet.of_state({key: np.array(value) for key, value in SampleSet(iter(rows)).state().items()})
    assert kept.fingerprint == of(*rows)
