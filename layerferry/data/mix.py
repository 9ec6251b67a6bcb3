"""Which rows, in what order: max_samples, num_samples, mixing of data sets, and the split into training and evaluation.

Everything here is arithmetic on indices. Random choices follow LLaMA-Factory's, so that the same seed gives the same rows:
num_samples draws from numpy's legacy generator, interleaving and splitting as the ``datasets`` library does (which is not
needed for it). Checked against that library by ``tests/data/test_mix.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np

from layerferry.errors import ConfigError, DataError

STRATEGIES = ("concat", "interleave_under", "interleave_over", "interleave_once")


def drawn(count: int, wanted: int, generator: np.random.RandomState) -> list[int]:
    """``wanted`` of ``count`` rows: a permutation's head, then, beyond one pass, draws with replacement."""
    found = generator.permutation(count)[:wanted]
    more = wanted - len(found)
    if more > 0:
        found = np.concatenate((found, generator.choice(count, more)))
    return [int(index) for index in found]


def mixed(counts: Sequence[int], strategy: str, probabilities: Sequence[float], seed: int) -> list[tuple[int, int]]:
    """(data set, row) pairs in training order, for data sets of ``counts`` rows."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"mix_strategy {strategy} is not known: {', '.join(STRATEGIES)}")
    if probabilities and strategy == "concat":
        raise ConfigError("interleave_probs needs mix_strategy interleave_under, interleave_over or interleave_once")
    if probabilities and len(probabilities) != len(counts):
        raise ConfigError(f"interleave_probs has {len(probabilities)} values for {len(counts)} data sets")
    if any(share < 0 for share in probabilities):
        raise ConfigError("interleave_probs has a negative value")
    if 0 in probabilities and len(counts) > 1 and strategy != "interleave_under":
        raise ConfigError(
            f"interleave_probs has a 0: its data set would never be drawn, and {strategy} waits until each has run out"
        )
    if len(counts) == 1 or strategy == "concat":
        return [(source, row) for source, count in enumerate(counts) for row in range(count)]
    if probabilities and not math.isclose(sum(probabilities), 1.0, rel_tol=1e-6):
        raise ConfigError(f"interleave_probs sum to {sum(probabilities):g}: they must sum to 1")
    turns = _random_turns(probabilities, seed) if probabilities else cycle(range(len(counts)))
    return _interleaved(counts, strategy, turns, in_rounds=not probabilities)


def _random_turns(probabilities: Sequence[float], seed: int) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield from (int(i) for i in generator.choice(len(probabilities), size=1000, p=probabilities))


def _interleaved(counts: Sequence[int], strategy: str, turns: Iterator[int], *, in_rounds: bool) -> list[tuple[int, int]]:
    """under: until a data set runs out. over: until each has run out once, starting over meanwhile. once: every row once."""
    if strategy == "interleave_under" and in_rounds:
        return [(source, row) for row in range(min(counts)) for source in range(len(counts))]
    if strategy == "interleave_over" and in_rounds:
        return [(source, row % count) for row in range(max(counts)) for source, count in enumerate(counts)]
    position, done, order = [0] * len(counts), [False] * len(counts), []
    for source in turns:
        if strategy == "interleave_once" and done[source]:
            continue
        order.append((source, position[source]))
        position[source] += 1
        if position[source] == counts[source]:
            done[source] = True
            position[source] = 0
        if all(done) or (strategy == "interleave_under" and any(done)):
            break
    return order


def split(count: int, val_size: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices for training and for evaluation: ``val_size`` rows if above 1, else that share of them."""
    held = int(val_size) if val_size > 1 else math.ceil(val_size * count)
    if not 0 < held < count:
        raise DataError(f"val_size {val_size:g} takes {held} of {count} rows: leave at least one row on each side")
    order = [int(index) for index in np.random.default_rng(seed).permutation(count)]
    return order[held:], order[:held]
