"""Several samples in one row: LLaMA-Factory's greedy knapsack, and pre-training's concatenation.

The knapsack never looks further than ``preprocessing_batch_size`` rows. Positions restart at each sample. LLaMA-Factory
pads every pack to ``cutoff_len`` with tokens that carry no loss; here padding waits until rows are collated, where it is as
short as it can be. Checked against LLaMA-Factory by ``tests/data/test_tokenize.py`` and by the sums of
``tests/data/test_pack.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

from layerferry.data.samples import Row

Item = TypeVar("Item")


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def knapsack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` per pack: always the longest that still fits, the last of equals first. Each must fit alone."""
    places: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        places[length].append(index)
    ordered = sorted(lengths)
    packs: list[list[int]] = []
    while ordered:
        free, pack = capacity, []
        while (fit := bisect_right(ordered, free)) > 0:
            length = ordered.pop(fit - 1)
            free -= length
            pack.append(places[length].pop())
        assert pack, "a sample is longer than the pack"
        packs.append(pack)
    return packs


def packed(rows: Sequence[Row], capacity: int) -> Iterator[Row]:
    """The rows of one chunk, packed; ``capacity`` tokens a pack."""
    for pack in knapsack([len(row.input_ids) for row in rows], capacity):
        members = [rows[index] for index in pack]
        yield Row(
            input_ids=list(chain.from_iterable(row.input_ids for row in members)),
            labels=list(chain.from_iterable(row.labels for row in members)),
            position_ids=list(chain.from_iterable(range(len(row.input_ids)) for row in members)),
        )


def blocks(texts: Sequence[list[int]], size: int) -> Iterator[list[int]]:
    """The texts of one chunk end to end, in blocks of ``size`` tokens; the tail that fills no block is dropped."""
    flat = list(chain.from_iterable(texts))
    for start in range(0, len(flat) // size * size, size):
        yield flat[start : start + size]
