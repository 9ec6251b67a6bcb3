"""config.json of real models, as published, shortened to what decides the architecture."""

from __future__ import annotations

from typing import Any

_QWEN_EXPERTS = {"decoder_sparse_step": 1, "norm_topk_prob": True, "router_aux_loss_coef": 0.001, "mlp_only_layers": []}

REAL: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "sliding_window": 131072, "max_window_layers": 28,
        "use_sliding_window": False, "tie_word_embeddings": False, "bos_token_id": 151643, "eos_token_id": 151643,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Gemma-2-9B": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096,
        "query_pre_attn_scalar": 224, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    },
    "Gemma-3-1B": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
        "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000, "query_pre_attn_scalar": 256,
        "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0,
    },
    "GPT-OSS-120B": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "num_local_experts": 128, "num_experts_per_tok": 4,
        "experts_per_token": 4, "swiglu_limit": 7.0, "rope_theta": 150000, "max_position_embeddings": 131072,
        "initial_context_length": 4096, "attention_bias": True, "eos_token_id": 200002, "pad_token_id": 199999,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
        "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "vocab_size": 129280, "max_position_embeddings": 163840,
        "num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        "max_window_layers": 48, "bos_token_id": 151643, "eos_token_id": 151645, **_QWEN_EXPERTS,
    },
    "Qwen3-Next-80B": {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "num_experts": 512, "num_experts_per_tok": 10, "vocab_size": 151936, "rope_theta": 10000000, "bos_token_id": 151643,
        "eos_token_id": 151645, **_QWEN_EXPERTS,
    },
    "Mamba-2.8B": {
        "model_type": "mamba", "hidden_size": 2560, "intermediate_size": 5120, "state_size": 16, "num_hidden_layers": 64,
        "time_step_rank": 160, "conv_kernel": 4, "expand": 2, "residual_in_fp32": True, "vocab_size": 50280,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    },
    "Mamba2-2.7B": {
        "model_type": "mamba2", "hidden_size": 2560, "state_size": 128, "num_hidden_layers": 64, "num_heads": 80,
        "head_dim": 64, "n_groups": 1, "expand": 2, "chunk_size": 256, "vocab_size": 50288,
    },
    "Jamba-v0.1": {
        "model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_offset": 4, "attn_layer_period": 8,
        "expert_layer_offset": 1, "expert_layer_period": 2, "num_experts": 16, "num_experts_per_tok": 2,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
        "vocab_size": 65536, "output_router_logits": True, "router_aux_loss_coef": 0.001, "pad_token_id": 0,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "output_router_logits": False,
    },
    "Phi-3-mini-128k": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "sliding_window": 262144, "rope_theta": 10000.0, "pad_token_id": 32000,
        "bos_token_id": 1, "eos_token_id": 32000,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
    },
    "OLMo-2-7B": {
        "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352, "rope_theta": 500000,
        "pad_token_id": 100277, "eos_token_id": 100257,
    },
    "GLM-4-9B": {
        "model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
        "attention_bias": True, "vocab_size": 151552, "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338],
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5, "vocab_size": 151552, "pad_token_id": 151329,
    },
    "Llama-4-Scout (text)": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "use_qk_norm": True,
        "vocab_size": 202048, "rope_theta": 500000.0, "pad_token_id": 200018, "bos_token_id": 200000,
        "no_rope_layers": [int((index + 1) % 4 != 0) for index in range(48)],
    },
    "Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_experts": 60, "num_experts_per_tok": 4, "vocab_size": 151936, "max_window_layers": 21, **_QWEN_EXPERTS,
    },
    "Nemotron-H-8B": {
        "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128, "chunk_size": 128, "vocab_size": 131072,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "GPT-2": {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
        "vocab_size": 50257, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    "Falcon-7B": {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024,
        "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "bias": False, "alibi": False,
    },
}  # fmt: skip
