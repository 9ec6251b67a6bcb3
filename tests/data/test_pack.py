"""Packing keeps every token once, within capacity, and never looks past its chunk."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from layerferry.data.pack import blocks, chunks, knapsack, packed
from layerferry.data.samples import Row

LENGTHS = st.lists(st.integers(1, 30), max_size=40)


@given(LENGTHS)
def test_every_sample_is_in_one_pack(lengths: list[int]) -> None:
    packs = knapsack(lengths, 30)
    assert Counter(index for pack in packs for index in pack) == Counter(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= 30 for pack in packs)


@given(LENGTHS)
def test_no_pack_could_have_taken_a_later_sample(lengths: list[int]) -> None:
    packs = [[lengths[index] for index in pack] for pack in knapsack(lengths, 30)]
    for number, pack in enumerate(packs):
        free = 30 - sum(pack)
        assert all(length > free for later in packs[number + 1 :] for length in later)


@given(LENGTHS)
def test_positions_restart_at_each_sample(lengths: list[int]) -> None:
    rows = [Row(input_ids=[number] * length, labels=[-number] * length) for number, length in enumerate(lengths)]
    for pack in packed(rows, 30):
        assert pack.position_ids is not None
        for place, position in enumerate(pack.position_ids):
            new = place == 0 or pack.input_ids[place] != pack.input_ids[place - 1]
            assert position == (0 if new else pack.position_ids[place - 1] + 1)
            assert pack.labels[place] == -pack.input_ids[place]


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=9), st.integers(1, 7))
def test_blocks_are_the_text_without_its_tail(texts: list[list[int]], size: int) -> None:
    flat = [token for text in texts for token in text]
    found = list(blocks(texts, size))
    assert all(len(block) == size for block in found)
    assert [token for block in found for token in block] == flat[: len(flat) // size * size]


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_chunks(items: list[int], size: int) -> None:
    found = list(chunks(items, size))
    assert [item for chunk in found for item in chunk] == items
    assert all(len(chunk) == size for chunk in found[:-1])
