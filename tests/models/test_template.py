"""Which layers may share a template, and what binding one does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from layerferry.models.build import build_on_meta
from layerferry.models.skeleton import Skeleton
from layerferry.models.template import behaviour_key
from tests.conformance.families import BY_TYPE, tiny_config


def skeleton_of(model_type: str, **changes: Any) -> Skeleton:
    model = build_on_meta(tiny_config(BY_TYPE[model_type], **changes), dtype=torch.float32, attention="eager")
    return Skeleton(model, decays=lambda *_: True, device=torch.device("cpu"), fp32=True)


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("llama", [0, 0, 0, 0]),
        ("gemma2", [0, 1, 0, 1]),  # window on, window off
        ("exaone4", [0, 0, 0, 1]),  # the last sees everything, without rotary
        ("smollm3", [0, 0, 0, 1]),  # no rotary in every fourth
        ("cohere2", [0, 0, 0, 1]),
        ("gpt_neo", [0, 1, 0, 1]),
        ("deepseek_v3", [0, 1, 1, 1]),  # dense first
        ("qwen3_next", [0, 0, 0, 1]),
        ("jamba", [0, 1, 0, 1]),
        ("llama4_text", [0, 1, 0, 2]),
    ],
)
def test_layers_that_behave_differently_have_different_keys(model_type: str, kinds: list[int]) -> None:
    keys = skeleton_of(model_type).keys
    numbered = dict(zip(keys, kinds, strict=True))
    assert [numbered[key] for key in keys] == kinds
    assert len(set(keys)) == len(set(kinds))


class Plain(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sliding_window": 4}, {"sliding_window": 5}),
        ({"sliding_window": 4}, {"sliding_window": None}),
        ({"use_rope": True}, {"use_rope": False}),
        ({"scaling": 0.5}, {"scaling": 0.25}),
        ({"act": partial(F.gelu, approximate="tanh")}, {"act": partial(F.gelu, approximate="none")}),
        ({"layer_type": "full_attention"}, {"layer_type": "sliding_attention"}),
        ({"sections": (1, 2)}, {"sections": (2, 1)}),
        ({"options": {"a": 1}}, {"options": {"a": 2}}),
        ({"act": torch.tanh}, {"act": torch.relu}),
        ({"act": nn.ReLU()}, {"act": nn.GELU()}),
    ],
)
def test_every_plain_attribute_counts(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert behaviour_key(Plain(**one)) != behaviour_key(Plain(**other))
    assert behaviour_key(Plain(**one)) == behaviour_key(Plain(**one))


def test_number_mode_and_values_do_not_count() -> None:
    one, other = Plain(layer_idx=0), Plain(layer_idx=7)
    other.eval()
    with torch.no_grad():
        other.weight.fill_(3)
    assert behaviour_key(one) == behaviour_key(other)


def test_binding_sets_number_and_buffers() -> None:
    from layerferry.layout import WEIGHT_PLANE, Plane

    skeleton = skeleton_of("deepseek_v3")
    unit = skeleton.layer_units[1]
    plane = Plane(unit.layout, WEIGHT_PLANE, torch.zeros(unit.layout.bytes(WEIGHT_PLANE), dtype=torch.uint8))
    template = skeleton.template(1, plane)
    name = next(name for name in skeleton.buffers[1] if name.endswith("e_score_correction_bias"))
    for index in (1, 2, 3):
        skeleton.buffers[index][name] = torch.full_like(skeleton.buffers[index][name], float(index))
        template.bind(index, skeleton.buffers[index])
        assert bool((template.module.get_buffer(name) == index).all())
        assert template.module.self_attn.layer_idx == index
    plane.buffer.fill_(1)
    assert all(
        parameter.data_ptr() == view.data_ptr() for parameter, view in zip(template.parameters, plane.views(), strict=True)
    )
