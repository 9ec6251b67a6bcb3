"""Configs that no model can be made of: each is an error that names what is wrong, none a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.errors import CheckpointError, ConfigError
from layerferry.models.build import build_on_meta, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def folder_of(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size.*expected int, got str"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"model_type": "lama"}, "model type `lama`"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, a model has at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, a model has at least 1"),
    ],
)
def test_a_config_that_transformers_refuses(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"no usable config.json: .*{message}"):
        read_config(folder_of(tmp_path, **changes))


def test_code_that_ships_with_a_model_names_its_key(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_type="mine", auto_map={"AutoConfig": "code.Config"})
    with pytest.raises(CheckpointError, match="contains custom code.*: trust_remote_code: true runs it"):
        read_config(folder)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no usable config.json: the folder has none"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    "changes", [{"hidden_act": "nope"}, {"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, {"vocab_size": -1}]
)
def test_a_config_that_no_model_can_be_made_of(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = read_config(folder_of(tmp_path, **changes))
    with pytest.raises(CheckpointError, match=r"llama: no model can be made of its config.json \((KeyError|RuntimeError): "):
        build_on_meta(config, dtype=torch.float32)


def test_an_attention_whose_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("FlashAttention2 has been toggled on, but it cannot be used\nmore")

    config = read_config(folder_of(tmp_path))
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", missing)
    with pytest.raises(ConfigError, match=r"flash_attn: .*FlashAttention2 has been toggled on.*: sdpa needs no package"):
        build_on_meta(config, dtype=torch.float32, attention="flash_attention_2")
