"""Row choices against the datasets library's and LLaMA-Factory's (goldens), and what they promise."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerferry.data import mix
from layerferry.errors import ConfigError, DataError
from tests.data import lf

CASES = [(json.loads(key), value) for key, value in lf.golden("lf_mix").items()]


@pytest.mark.parametrize(("case", "golden"), [case for case in CASES if isinstance(case[0][0], list)])
def test_interleaving_is_the_librarys(case: list, golden: list[list[int]]) -> None:
    counts, strategy, probabilities = case
    assert [list(pair) for pair in mix.mixed(counts, strategy, probabilities, 42)] == golden


def test_splits_are_the_librarys() -> None:
    checked = 0
    for case, golden in CASES:
        if case[0] == "split":
            assert list(mix.split(*case[1:])) == golden
            checked += 1
    assert checked == 3


def test_draws_are_llamafactorys() -> None:
    generator = np.random.RandomState(42)
    draws = [(case, golden) for case, golden in CASES if case[0] == "drawn"]
    assert [mix.drawn(*case[1:], generator) for case, _ in draws] == [golden for _, golden in draws]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.booleans())
def test_every_row_once(counts: list[int], weighted: bool) -> None:
    everything = Counter((source, row) for source, count in enumerate(counts) for row in range(count))
    weights = [1 / len(counts)] * len(counts) if weighted else []
    assert Counter(mix.mixed(counts, "interleave_once", weights, 3)) == everything
    assert Counter(mix.mixed(counts, "concat", [], 3)) == everything
    assert set(mix.mixed(counts, "interleave_over", weights, 3)) == set(everything)


@pytest.mark.parametrize(
    ("strategy", "probabilities", "message"),
    [
        ("shuffle", [], "mix_strategy shuffle is not known"),
        ("concat", [0.5, 0.5], "interleave_probs needs mix_strategy"),
        ("interleave_under", [1.0], "1 values for 2 data sets"),
        ("interleave_under", [0.9, 0.9], r"sum to 1.8"),
        ("interleave_over", [0.0, 1.0], "interleave_probs has a 0: its data set would never be drawn, and interleave_over waits"),
        ("interleave_once", [0.0, 1.0], "interleave_probs has a 0"),
        ("interleave_under", [-0.5, 1.5], "interleave_probs has a negative value"),
    ],
)
def test_bad_mixes(strategy: str, probabilities: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mix.mixed([2, 3], strategy, probabilities, 42)


@pytest.mark.parametrize("val_size", [1.0, 10, 11])
def test_a_split_leaves_both_sides(val_size: float) -> None:
    with pytest.raises(DataError, match="at least one row on each side"):
        mix.split(10, val_size, 42)
