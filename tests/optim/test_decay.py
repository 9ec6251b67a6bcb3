"""The decay rule against Hugging Face Trainer's own, on tiny models of many families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from layerferry.optim.decay import decays

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {},
    "mixtral": {"num_local_experts": 2},
    "olmo2": {},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "bloom": {"n_layer": 2, "n_head": 2},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "nemotron": {},
    "cohere": {},
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2},
    "phi": {},
    "gpt_neox": {},
    "mamba": {"state_size": 4},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


def tiny(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SMALL | FAMILIES[family])))
    return model


def owner_of(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name.rpartition(".")[0])).__name__


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_rule_is_trainers(family: str) -> None:
    from transformers import Trainer

    model = tiny(family)
    names = [name for name, _ in model.named_parameters()]
    theirs = set(Trainer.get_decay_parameter_names(None, model)) & set(names)
    ours = {name for name in names if decays(name, owner_of(model, name))}
    assert ours == theirs
    assert 0 < len(ours) < len(names), "both kinds must occur, or the comparison is empty"


@pytest.mark.parametrize(
    ("name", "owner", "wanted"),
    [
        ("model.layers.0.mlp.up_proj.weight", "Linear", True),
        ("model.embed_tokens.weight", "Embedding", True),
        ("model.layers.0.self_attn.q_proj.bias", "Linear", False),
        ("model.layers.0.input_layernorm.weight", "Module", False),
        ("model.norm.weight", "RMSNorm", False),
        ("model.layers.0.self_attn.q_norm.weight", "Module", False),
        ("model.layers.0.RMSNorm_1.scale", "Module", False),
        ("transformer.ln_f.weight", "LayerNorm", False),
        ("transformer.ln_f.weight", "RMSNorm", True),
        ("transformer.ln_f.weight", "NemotronLayerNorm1P", False),
        ("model.normaliser.weight", "Linear", True),
    ],
)
def test_names(name: str, owner: str, wanted: bool) -> None:
    assert decays(name, owner) is wanted
