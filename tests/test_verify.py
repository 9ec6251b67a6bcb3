"""``layerferry verify`` on the configs of real models: every behaviour kept, small, in seconds, right; and wrong where it is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import layerferry.models.template as template_module
from layerferry.errors import CheckpointError, ModelRefused
from layerferry.models.build import build_on_meta, read_config
from layerferry.models.shrink import shrunk
from layerferry.models.stack import find_stack
from layerferry.models.template import behaviour_key
from layerferry.verify import MAX_PARAMS, verify
from tests.real_configs import REAL

SECONDS = 30


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", REAL)
def test_real_configs_are_right_in_seconds(name: str, tmp_path: Path) -> None:
    begin = time.perf_counter()
    report = verify(folder_of(tmp_path, REAL[name]))
    assert report.ok, report.render()
    assert report.num_params < MAX_PARAMS
    assert time.perf_counter() - begin < SECONDS
    if not REAL[name].get("output_router_logits"):  # else padding is routed too, beside another mask: rounding
        assert all(unit.equal for unit in report.units), report.render()


@pytest.mark.parametrize(
    "name", ["Gemma-3-1B", "DeepSeek-V3", "Jamba-v0.1", "Qwen3-Next-80B", "Llama-4-Scout (text)", "GPT-OSS-120B"]
)
def test_the_copy_shows_every_kind_of_layer(name: str, tmp_path: Path) -> None:
    """Kinds as the class names inside a layer and its plain attributes that are no sizes, on the full-depth narrow model."""
    config = read_config(str(folder_of(tmp_path, REAL[name])))
    small = shrunk(config)
    full_depth = type(small).from_dict(
        {**small.to_dict(), "num_hidden_layers": REAL[name]["num_hidden_layers"], **_per_layer(config)}
    )
    assert set(_keys(small)) == set(_keys(full_depth))
    assert small.num_hidden_layers < config.num_hidden_layers


def _per_layer(config: Any) -> dict[str, Any]:
    depth = config.num_hidden_layers
    return {n: v for n, v in config.to_dict().items() if (isinstance(v, list) and len(v) == depth) or n == "moe_layers"}


def _keys(config: Any) -> list[Any]:
    model = build_on_meta(config, dtype=torch.float32)
    return [behaviour_key(layer) for layer in find_stack(model, model.config)[1]]


def test_relations_survive(tmp_path: Path) -> None:
    small = shrunk(read_config(str(folder_of(tmp_path, REAL["DeepSeek-V3"]))))
    assert small.num_hidden_layers == 4  # three dense ones and the first with experts
    assert small.n_group == 2 and small.topk_group == 1
    assert not hasattr(small, "quantization_config")
    small = shrunk(read_config(str(folder_of(tmp_path, REAL["Qwen2.5-7B"]))))
    assert small.num_attention_heads == 2 * small.num_key_value_heads
    small = shrunk(read_config(str(folder_of(tmp_path, REAL["GPT-2"]))))
    assert small.attn_pdrop == small.embd_pdrop == small.resid_pdrop == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 40},
        {"vocab_size": 100, "pad_token_id": 99},
        {"num_hidden_layers": 1},
        {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 1},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
        {"max_position_embeddings": 8},
    ],
)
def test_models_that_are_small_already(changes: dict[str, Any], tmp_path: Path) -> None:
    report = verify(folder_of(tmp_path, REAL["Qwen2.5-7B"] | changes))
    assert report.ok, report.render()


def test_learned_places_fewer_than_the_rows(tmp_path: Path) -> None:
    assert verify(folder_of(tmp_path, REAL["GPT-2"] | {"n_positions": 16, "n_ctx": 16})).ok


def test_report_for_a_person_and_for_a_program(tmp_path: Path) -> None:
    report = verify(folder_of(tmp_path, REAL["Qwen2.5-7B"]))
    text, facts = report.render(), report.to_dict()
    assert text.endswith("right") and "layer.1" in text and "qwen2" in text
    assert json.loads(json.dumps(facts)) == facts
    assert [unit["unit"] for unit in facts["units"]] == ["prologue", "layer.0", "layer.1", "epilogue"]
    assert facts["ok"] is True


def test_a_wrong_engine_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that run with the buffers of other layers, as deepseek_v3's router corrections once did."""

    def forgetful(self: template_module.Template, index: int, buffers: Any) -> template_module.Template:
        for module, name in self._indexed:
            setattr(module, name, index)
        for owner, leaf in self._buffer_owners.values():
            owner._buffers[leaf] = torch.randn_like(owner._buffers[leaf]) * 0.5  # another layer's
        return self

    monkeypatch.setattr(template_module.Template, "bind", forgetful)
    report = verify(folder_of(tmp_path, REAL["DeepSeek-V3"]))
    assert not report.ok and "WRONG" in report.render()


def test_refused_models_raise(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="encoder-decoder"):
        verify(folder_of(tmp_path, {"model_type": "t5"}))
    with pytest.raises(ModelRefused, match="vision_config"):
        verify(folder_of(tmp_path, {"model_type": "gemma3", "text_config": {}, "vision_config": {}}))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        verify(tmp_path)
    with pytest.raises(CheckpointError, match="no model can be made of its config.json"):
        verify(folder_of(tmp_path, REAL["Qwen2.5-7B"] | {"hidden_act": "nope"}))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="config.json"):
        verify(tmp_path)


def test_the_callers_random_numbers_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    verify(folder_of(tmp_path, REAL["Qwen2.5-7B"]))
    assert torch.equal(torch.get_rng_state(), state)
