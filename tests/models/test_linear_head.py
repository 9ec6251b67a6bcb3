"""Shapes of heads, found without a weight; heads that are something else are not taken for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerferry.models.build import build_on_meta
from layerferry.models.linear_head import Shape, shape_of
from layerferry.models.skeleton import Skeleton
from layerferry.models.tables import _on_zeros
from tests.conformance.families import BY_TYPE, tiny_config

UNTIED = {"tie_word_embeddings": False}


def skeleton_of(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Skeleton:
    model = build_on_meta(tiny_config(BY_TYPE[model_type], **changes), dtype=dtype)
    return Skeleton(model, decays=lambda *_: True, device=torch.device("cpu"), fp32=dtype == torch.float32)


def found(skeleton: Skeleton) -> Shape | None:
    with _on_zeros(skeleton, (skeleton.prologue_unit, skeleton.epilogue_unit)):
        return shape_of(skeleton)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "changes", "shape"),
    [
        ("llama", {}, Shape()),
        ("gemma2", {"final_logit_softcapping": 2.0}, Shape(cap=2.0)),
        ("gemma2", {"final_logit_softcapping": 30.0, **UNTIED}, Shape(cap=30.0)),
        ("cohere", {"logit_scale": 0.0625}, Shape(scale=0.0625)),
        ("granite", {"logits_scaling": 4.0}, Shape(scale=0.25)),
        ("phi", {}, Shape()),
    ],
)
def test_the_shape_is_found_by_number(model_type: str, changes: dict[str, Any], shape: Shape, dtype: torch.dtype) -> None:
    assert found(skeleton_of(model_type, dtype, **changes)) == shape


def test_a_head_that_mixes_the_vocabulary_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = skeleton_of("llama")
    own = type(skeleton).after_head

    def mixed(self: Skeleton, output: Tensor, hidden: Tensor | None = None) -> Tensor:
        return own(self, output, hidden).softmax(-1)

    monkeypatch.setattr(type(skeleton), "after_head", mixed)
    assert found(skeleton) is None


def test_a_head_that_reads_the_hidden_states_again_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = skeleton_of("llama")
    own = type(skeleton).after_head

    def added(self: Skeleton, output: Tensor, hidden: Tensor | None = None) -> Tensor:
        return own(self, output, hidden) + (0.0 if hidden is None else hidden.mean())

    monkeypatch.setattr(type(skeleton), "after_head", added)
    assert found(skeleton) is None


def test_a_head_with_a_forward_of_its_own_is_not_taken_for_one() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(2 * input)

    skeleton = skeleton_of("llama")
    assert skeleton.head_module is not None
    skeleton.head_module.__class__ = Doubled
    assert found(skeleton) is None
