"""Rates by hand."""

from __future__ import annotations

import pytest
import torch

from layerferry.engine.batch import MicroBatch
from layerferry.trainer.meter import WINDOW_STEPS, Meter, Work, model_flops


def test_the_first_step_is_forgotten() -> None:
    meter = Meter(1000.0)
    meter.add(Work(100, 500.0, 50.0))
    assert meter.tokens_per_s == 2.0 and meter.seconds_per_step is None
    meter.add(Work(100, 500.0, 2.0))
    meter.add(Work(200, 700.0, 1.0))
    assert meter.tokens_per_s == pytest.approx(100.0)
    assert meter.seconds_per_step == pytest.approx(1.5)
    assert meter.mfu == pytest.approx(1200 / 3 / 1000)


def test_a_window_of_recent_steps() -> None:
    meter = Meter(None)
    for _ in range(5):
        meter.add(Work(1, 0.0, 1.0))
    for _ in range(WINDOW_STEPS):
        meter.add(Work(7, 0.0, 1.0))
    assert meter.tokens_per_s == pytest.approx(7.0)
    assert meter.mfu is None


def test_isolated_samples_see_themselves_alone() -> None:
    """Rows of 3 + 4 and of 5 tokens, one of padding that begins anew: as three rows of their own."""
    ids = torch.zeros(2, 8, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 1, 2]])
    given = {"input_ids": ids, "labels": ids, "lengths": torch.tensor([7, 5]), "position_ids": positions}
    alone = model_flops([MicroBatch(**given, isolated=True)], lambda length: 10 + length)
    assert alone == 3 * 13 + 4 * 14 + 5 * 15
    assert model_flops([MicroBatch(**given)], lambda length: 10 + length) == 7 * 17 + 5 * 15


def test_model_flops_counts_real_tokens() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    batch = MicroBatch(input_ids=ids, labels=ids, lengths=torch.tensor([3, 8]))
    assert model_flops([batch, batch], lambda length: 10 + length) == 2 * (3 * 13 + 8 * 18)
