"""Attention that is not computed twice: the second forward and its gradients are the first one's, and no kernel runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerferry.models import varlen
from layerferry.models.attention_outputs import AttentionOutputs
from tests.models.attention_kernels import Kernels


class Attention(torch.nn.Module):
    """As a family's: calls the registered function."""

    num_key_value_groups = 2
    is_causal = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return varlen.attention(self, query, key, value, None, scaling=0.3, **options)[0]


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 4, 32, 16), (2, 2, 32, 16), (2, 2, 32, 16)]
    return [torch.randn(shape).requires_grad_(True) for shape in shapes]


def test_the_second_forward_runs_no_kernel_and_has_the_firsts_gradients() -> None:
    layer, outputs, given = Attention(), AttentionOutputs(), inputs()
    slope = torch.randn(2, 32, 4, 16)
    expected = layer(*given)
    gradients = torch.autograd.grad(expected, given, slope)
    outputs.watch(layer)
    results: Any = []
    with outputs.recording(results), Kernels() as first:
        recorded = layer(*given)
    assert torch.equal(recorded, expected) and len(results) == 1 and first.count == 1
    assert all(one.grad_fn is None for one in results[0] if isinstance(one, Tensor)), "no graph hangs on what is kept"
    with outputs.answering(results), Kernels() as second:
        again = layer(*given)
    assert second.count == 0 and torch.equal(again, expected) and not results
    for one, other in zip(torch.autograd.grad(again, given, slope), gradients, strict=True):
        assert torch.equal(one, other)


def test_outside_nothing_is_recorded() -> None:
    layer, outputs, given = Attention(), AttentionOutputs(), inputs()
    outputs.watch(layer)
    with Kernels() as kernels:
        layer(*given)
    assert kernels.count == 1


def test_attention_that_drops_is_computed_again() -> None:
    layer, outputs, given = Attention(), AttentionOutputs(), inputs()
    outputs.watch(layer)
    results: Any = []
    torch.manual_seed(1)
    with outputs.recording(results):
        first = layer(*given, dropout=0.5)
    torch.manual_seed(1)
    with outputs.answering(results):
        assert torch.equal(layer(*given, dropout=0.5), first)
    assert not results
