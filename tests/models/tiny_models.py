"""Tiny random Hugging Face models, one per way in which a checkpoint can be laid out."""

from __future__ import annotations

from typing import Any

import torch

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "qwen2": _SMALL,
    "qwen3": {**_SMALL, "head_dim": 8},
    "mixtral": {**_SMALL, "num_local_experts": 12, "num_experts_per_tok": 2},
    "qwen2_moe": {**_SMALL, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_SMALL, **_EXPERTS, "head_dim": 8},
    "olmoe": {**_SMALL, "num_experts": 12, "num_experts_per_tok": 2},
    "gpt_oss": {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": {
        **_SMALL,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": {
        **_SMALL,
        "head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "gemma2": {**_SMALL, "head_dim": 8},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "falcon": {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
    "phi3": _SMALL,
    "jamba": {
        **_SMALL,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **changes})


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Random in every parameter and persistent float buffer, so that no two tensors can be confused."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.05)
    return model


def meta_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The same model without weights, as the engine builds it."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
