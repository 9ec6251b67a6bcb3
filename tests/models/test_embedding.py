"""The embedding tap against autograd's dense gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerferry.models.embedding import EmbeddingTap

IDS = torch.tensor([[1, 2, 2, 0], [5, 2, 0, 3]])


def tapped_gradient(table: Tensor, look: Any, slope: Tensor) -> Tensor:
    with EmbeddingTap([table]) as tap:
        output = look(table)
    target = torch.zeros(table.shape)
    leaves = [look_up.leaf for look_up in tap.look_ups]
    for look_up, gradient in zip(tap.look_ups, torch.autograd.grad(output, leaves, slope), strict=True):
        look_up.add_gradient(gradient, target)
    return target


@pytest.mark.parametrize("padding_idx", [None, 0, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_autograd_with_repeated_ids(padding_idx: int | None, dtype: torch.dtype) -> None:
    """Exactly, in sums that fp32 holds exactly: small whole numbers."""
    generator = torch.Generator().manual_seed(0)
    table = nn.Parameter(torch.randint(-8, 8, (8, 4), generator=generator).to(dtype))
    slope = torch.randint(-8, 8, (2, 4, 4), generator=generator).to(dtype)

    def look(weight: Tensor) -> Tensor:
        return F.embedding(IDS, weight, padding_idx=padding_idx) * 2

    expected = torch.autograd.grad(look(table), table, slope)[0]
    assert torch.equal(tapped_gradient(table, look, slope), expected.float())


def test_many_repeats_are_summed_in_fp32() -> None:
    """4096 times the same row, each with gradient 1 + 2^-7 in bf16: a bf16 sum would stop at 256."""
    table = nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
    ids = torch.ones(4096, dtype=torch.int64)
    slope = torch.full((4096, 1), 1 + 2.0**-7, dtype=torch.bfloat16)
    found = tapped_gradient(table, lambda weight: F.embedding(ids, weight), slope)
    assert found.tolist() == [[0.0], [4096 * (1 + 2.0**-7)]]


def test_values_are_untouched_and_may_be_changed_in_place() -> None:
    table = nn.Parameter(torch.tensor([[0.0, -0.0, 1.5, float("inf")], [3.0, -2.0, 1e-45, -float("inf")]]))
    with EmbeddingTap([table]) as tap:
        output = F.embedding(torch.tensor([0, 1]), table)
        assert torch.equal(output.view(torch.int32), table.detach().view(torch.int32))  # every bit, the signs of zeros too
        output *= 2.0  # ctrl scales its embeddings so
    (gradient,) = torch.autograd.grad(output.sum(), [tap.look_ups[0].leaf])
    assert torch.equal(gradient, torch.full((2, 4), 2.0))


def test_the_leaf_takes_no_memory() -> None:
    table = nn.Parameter(torch.zeros(8, 4))
    with EmbeddingTap([table]) as tap:
        F.embedding(IDS, table)
    assert tap.look_ups[0].leaf.untyped_storage().nbytes() == table.element_size()


def test_other_tables_run_as_they_are() -> None:
    table, other = nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.ones(8, 4))
    with EmbeddingTap([table]) as tap:
        output = F.embedding(IDS, other)
    assert not tap.look_ups
    assert torch.autograd.grad(output.sum(), other)[0].sum() == IDS.numel() * 4


def test_without_gradient_nothing_is_remembered() -> None:
    table = nn.Parameter(torch.zeros(8, 4))
    with torch.no_grad(), EmbeddingTap([table]) as tap:
        F.embedding(IDS, table)
    assert not tap.look_ups


def test_the_blind_tap_reads_no_table() -> None:
    table = torch.full((8, 4), torch.nan)
    with EmbeddingTap.blind():
        assert not F.embedding(IDS, table).any()
    with EmbeddingTap.blind(torch.nan):
        assert bool(torch.isnan(F.embedding(IDS, torch.zeros(8, 4))).all())
