"""The head in parts against fp64: loss and every gradient, with ignored labels, bias, scale, soft-cap and many blocks.

The bound is that of the fused head (``test_fused_linear.py``), with one more rounding a block for the log-sum-exp and for the
sum of dL/dx.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerferry.engine.ends_in_parts import block_of
from layerferry.errors import ModelRefused
from layerferry.layout import FP32_PLANE, WEIGHT, Plane
from layerferry.objectives import CrossEntropy, OnHidden, OnLogits
from layerferry.objectives.base import DividesHead
from layerferry.objectives.head import Head
from layerferry.units import Part, divide
from tests.conformance.harness import masked
from tests.objectives.heads import HEADS, batch, head_of, hidden_states
from tests.objectives.test_fused_linear import assert_close, in_fp64


def passes(name: str, count: int, chunk_tokens: int, micro_batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor], Head]:
    """(loss, dL/dhidden, parameter gradients, the whole head) of a head in ``count`` parts, over copies of its bytes."""
    _, engine, whole = head_of(name, chunk_tokens)
    skeleton, unit = whole.skeleton, whole.skeleton.epilogue_unit
    assert skeleton.head is not None
    unit = replace(unit, tables=tuple(entry.name for entry in skeleton.head if entry is not None))  # tied: on its own
    home, hidden = engine.store.plane(unit, WEIGHT), hidden_states()
    gradients = Plane(unit.layout, FP32_PLANE, torch.zeros(unit.layout.bytes(FP32_PLANE), dtype=torch.uint8))
    parts = [part for part in divide(unit, count) if isinstance(part, Part)]
    assert len(parts) > 1

    def bound(part: Part) -> tuple[Head, Tensor]:
        buffer = torch.full((part.layout.bytes(home.spec),), 0xFF, dtype=torch.uint8)
        for at_home, in_piece in part.stretches(home.spec):
            buffer[in_piece] = home.buffer[at_home]
        sums = Plane(part.layout, FP32_PLANE, torch.zeros(part.layout.bytes(FP32_PLANE), dtype=torch.uint8))
        return Head(skeleton, skeleton.bind(part, Plane(part.layout, home.spec, buffer)), sums, chunk_tokens), buffer

    first, _ = bound(parts[0])
    way = CrossEntropy().in_parts(first)
    tokens = way.begin(first, hidden, micro_batch)
    for part in parts:
        head, buffer = bound(part)
        way.look(block_of(head, part, buffer), tokens)
    loss = way.loss(tokens) / 17.0
    gradient = torch.empty(0)
    for part in reversed(parts):
        head, buffer = bound(part)
        way.pull(block_of(head, part, buffer), tokens, 17.0)
        if part is parts[0]:
            gradient = way.finish(head, hidden, tokens)
        assert head.accumulator is not None
        for at_home, in_piece in part.stretches(FP32_PLANE):
            gradients.buffer[at_home] = head.accumulator.buffer[in_piece]
    engine.close()
    skeleton.bind(unit, home)
    return loss, gradient, {entry.name: gradients.view(entry) for entry in unit.layout.entries}, whole


@pytest.mark.parametrize("chunk_tokens", [4096, 5])
@pytest.mark.parametrize("count", [2, 7, 24])
@pytest.mark.parametrize("name", [name for name in HEADS if name != "biased"])
def test_against_fp64(name: str, count: int, chunk_tokens: int) -> None:
    micro_batch = batch()
    loss, gradient, found, whole = passes(name, count, chunk_tokens, micro_batch)
    exact_loss, exact_gradient, exact = in_fp64(whole, hidden_states(), micro_batch, 17.0)
    assert abs(float(loss - exact_loss)) <= micro_batch.labels.numel() * (8 + count) * 2.0**-24 * float(exact_loss)
    assert_close(gradient, exact_gradient)
    for entry, expected in exact.items():
        assert_close(found[entry], expected)
    assert not gradient[micro_batch.labels.roll(-1, 1) == -100][:-1].any()


def test_nothing_to_train_is_zero_without_a_crash() -> None:
    loss, gradient, found, _ = passes("plain", 3, 4096, masked(batch()))
    assert loss.item() == 0 and not gradient.any() and not any(value.any() for value in found.values())


def test_a_head_that_is_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, head = head_of("plain")
    own = type(engine.skeleton).logits
    monkeypatch.setattr(type(engine.skeleton), "logits", lambda self, hidden: own(self, hidden) ** 3)
    with pytest.raises(ModelRefused, match="end_parts: 1 feeds it whole"):
        CrossEntropy().in_parts(head)
    engine.close()


def test_only_cross_entropy_can_do_with_parts() -> None:
    assert isinstance(CrossEntropy(), DividesHead)
    for objective in (OnLogits(lambda logits, labels: logits.sum()), OnHidden(lambda hidden, micro_batch: hidden.sum())):
        assert not isinstance(objective, DividesHead)
