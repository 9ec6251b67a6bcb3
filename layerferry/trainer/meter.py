"""Speed: real tokens a second, share of the device's arithmetic, and the time that is left.

The rates are those of the last few steps, evaluations and saves not counted. The first step compiles, so it is
forgotten as soon as there is a second one. Checked by ``tests/trainer/test_meter.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerferry.engine.batch import MicroBatch

WINDOW_STEPS = 20


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computed, and how long it took from its batch's request to its report."""

    tokens: int
    flops: float
    seconds: float


class Meter:
    """Written by the training loop only."""

    def __init__(self, flops_per_s: float | None) -> None:
        self._flops_per_s = flops_per_s
        self._steps: deque[Work] = deque(maxlen=WINDOW_STEPS)
        self._has_warm_steps = False

    def add(self, work: Work) -> None:
        """Count one step."""
        if self._steps and not self._has_warm_steps:
            self._steps.clear()
            self._has_warm_steps = True
        self._steps.append(work)

    @property
    def seconds_per_step(self) -> float | None:
        """None before the second step: the first one compiles, and says nothing about those to come."""
        if not self._has_warm_steps:
            return None
        return sum(work.seconds for work in self._steps) / len(self._steps)

    @property
    def tokens_per_s(self) -> float:
        return sum(work.tokens for work in self._steps) / max(sum(work.seconds for work in self._steps), 1e-9)

    @property
    def mfu(self) -> float | None:
        """Model-FLOP/s over the device's rate; None where that is not known."""
        if not self._flops_per_s:
            return None
        return sum(work.flops for work in self._steps) / max(sum(work.seconds for work in self._steps), 1e-9) / self._flops_per_s


def model_flops(micro_batches: Sequence[MicroBatch], flops_per_token: Callable[[float], float]) -> float:
    """Model FLOPs of a step on its real tokens; attention counts what a token can see: its row, or its sample in it where those
    are isolated."""
    lengths = [length for micro_batch in micro_batches for length in seen_lengths(micro_batch)]
    return sum(length * flops_per_token(length) for length in lengths if length)


def seen_lengths(micro_batch: MicroBatch) -> list[int]:
    """Tokens of every stretch in which tokens see each other, padding not counted."""
    lengths = [int(length) for length in micro_batch.lengths]
    if not micro_batch.isolated or micro_batch.position_ids is None:
        return lengths
    found: list[int] = []
    for positions, length in zip(micro_batch.position_ids, lengths, strict=True):
        starts = (positions[:length] == 0).nonzero().flatten().tolist()
        found += [end - start for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return found
