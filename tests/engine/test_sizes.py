"""Rows beyond the plan are refused before they take memory that was not planned."""

from __future__ import annotations

import pytest
import torch

from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import refuse_beyond_plan
from layerferry.errors import PlanError
from layerferry.plan import Plan


def batch(rows: int, tokens: int) -> MicroBatch:
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    return MicroBatch(input_ids=ids, labels=ids, lengths=torch.full((rows,), tokens))


def test_rows_within_the_plan_pass_padding_included() -> None:
    refuse_beyond_plan([batch(2, 104), batch(1, 8)], Plan(micro_batch_rows=2, row_tokens=101))
    refuse_beyond_plan([batch(9, 999)], Plan())  # a plan by hand that names no row


def test_shorter_rows_may_be_more() -> None:
    refuse_beyond_plan([batch(4, 48)], Plan(micro_batch_rows=2, row_tokens=96))


@pytest.mark.parametrize(("rows", "tokens", "remedy"), [(1, 112, "row_tokens=112"), (3, 104, "micro_batch_rows=3")])
def test_what_was_not_planned_is_refused_with_the_remedy(rows: int, tokens: int, remedy: str) -> None:
    with pytest.raises(PlanError, match=remedy):
        refuse_beyond_plan([batch(rows, tokens)], Plan(micro_batch_rows=2, row_tokens=101))
