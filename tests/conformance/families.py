"""The conformance list: one tiny config per model type that must equal plain autograd, and those that must be refused.

The page of supported families (``docs/families.md``) is generated from this list (``tools/render_families.py``). Four
layers; windows shorter than the rows; half as many key-value heads as heads where the family has grouped ones.
To add a family: add its line here. Nothing else is usually needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type, what kind of network it is, and what its tiny config changes in ``BASE``."""

    model_type: str
    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    aux_loss: bool = False
    """The family's own forward adds a load-balancing loss when ``output_router_logits`` asks for it."""
    rows: int = 2
    """Rows of a micro-batch. One where learned positions are looked up again in every row: the engine adds look-ups one by
    one, autograd sums those of a micro-batch first, and the last bit is only the same where none is looked up twice."""


def tiny_config(family: Family, **changes: Any) -> Any:
    """The family's tiny config with every source of randomness switched off."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family.model_type, **{**BASE, **family.changes, **changes})
    for name, value in config.to_dict().items():
        random = any(word in name for word in ("dropout", "pdrop", "layerdrop", "jitter"))
        if random and isinstance(value, float) and name not in changes:
            setattr(config, name, 0.0)
    return config


DENSE, WINDOW, LINEAR, STATE, EXPERTS = "dense", "sliding window", "hybrid linear attention", "state space", "mixture of experts"

_ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_HEADS = {"head_dim": 8}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "n_inner": 48}


def _family(model_type: str, kind: str, *parts: dict[str, Any], aux_loss: bool = False, rows: int = 2, **changes: Any) -> Family:
    merged = {key: value for part in parts for key, value in part.items()}
    return Family(model_type=model_type, kind=kind, changes={**merged, **changes}, aux_loss=aux_loss, rows=rows)


FAMILIES: tuple[Family, ...] = (
    _family("llama", DENSE),
    _family("mistral", DENSE),
    _family("ministral3", DENSE, _HEADS),
    _family("qwen2", DENSE),
    _family("qwen3", DENSE, _HEADS),
    _family("gemma", DENSE, _HEADS),
    _family("phi", DENSE, num_key_value_heads=4),
    _family("phi3", DENSE),
    _family("olmo", DENSE),
    _family("olmo2", DENSE),
    _family("glm", DENSE, _HEADS),
    _family("glm4", DENSE, _HEADS),
    _family("cohere", DENSE),
    _family("granite", DENSE),
    _family("smollm3", DENSE),
    _family("stablelm", DENSE),
    _family("starcoder2", DENSE),
    _family("nemotron", DENSE),
    _family("seed_oss", DENSE, _HEADS),
    _family("apertus", DENSE),
    _family("helium", DENSE, _HEADS),
    _family("ernie4_5", DENSE, _HEADS),
    _family("hunyuan_v1_dense", DENSE, _HEADS),
    _family("arcee", DENSE),
    _family("bitnet", DENSE),
    _family("diffllama", DENSE),
    _family("nanochat", DENSE),
    _family("persimmon", DENSE),
    _family("gpt2", DENSE, _GPT),
    _family("gpt_bigcode", DENSE, _GPT),
    _family("gptj", DENSE, _GPT, rotary_dim=4),
    _family("codegen", DENSE, _GPT, rotary_dim=4),
    _family("gpt_neox", DENSE),
    _family("bloom", DENSE, n_layer=4, n_head=4),
    _family("falcon", DENSE),
    _family("mpt", DENSE, d_model=32, n_heads=4, n_layers=4, max_seq_len=64),
    _family("opt", DENSE, ffn_dim=48, word_embed_proj_dim=32, rows=1),
    _family("ctrl", DENSE, _GPT, dff=48),
    _family("biogpt", DENSE),
    _family("gemma2", WINDOW, _HEADS, sliding_window=4, query_pre_attn_scalar=8),
    _family("gemma3_text", WINDOW, _HEADS, _ALTERNATING, query_pre_attn_scalar=8),
    _family(
        "gemma4_text",
        WINDOW,
        _HEADS,
        _ALTERNATING,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
        num_kv_shared_layers=0,
        global_head_dim=8,
    ),
    _family("vaultgemma", WINDOW, _HEADS, sliding_window=4, query_pre_attn_scalar=8),
    _family("ministral", WINDOW, _HEADS, _ALTERNATING),
    _family("olmo3", WINDOW, sliding_window=4),
    _family("cohere2", WINDOW, sliding_window=4),
    _family("exaone4", WINDOW, sliding_window=4),
    _family("gpt_neo", WINDOW, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=4),
    _family("lfm2", LINEAR, layer_types=["conv", "full_attention"] * 2, block_multiple_of=8),
    _family("qwen3_5_text", LINEAR, _HEADS, _DELTA, layer_types=["linear_attention", "full_attention"] * 2),
    _family("olmo_hybrid", LINEAR, _DELTA, layer_types=["linear_attention", "full_attention"] * 2),
    _family("recurrent_gemma", LINEAR, lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"]),
    _family("mamba", STATE, state_size=8),
    _family("mamba2", STATE, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8, expand=2),
    _family("falcon_mamba", STATE, state_size=8),
    _family("bamba", STATE, _MAMBA2, attn_layer_indices=[1, 3]),
    _family("falcon_h1", STATE, _HEADS, _MAMBA2, mamba_d_ssm=64),
    _family(
        "jamba",
        STATE,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=8,
        aux_loss=True,
    ),
    _family(
        "nemotron_h",
        STATE,
        _HEADS,
        _ROUTED,
        layers_block_type=["mamba", "attention", "moe", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        moe_shared_expert_intermediate_size=16,
    ),
    _family(
        "granitemoehybrid",
        STATE,
        _LOCAL,
        _MAMBA2,
        shared_intermediate_size=16,
        layer_types=["mamba", "attention"] * 2,
        aux_loss=True,
    ),
    _family("mixtral", EXPERTS, _LOCAL, aux_loss=True),
    _family("qwen2_moe", EXPERTS, _EXPERTS, shared_expert_intermediate_size=16, decoder_sparse_step=1, aux_loss=True),
    _family("qwen3_moe", EXPERTS, _EXPERTS, _HEADS, aux_loss=True),
    _family("qwen3_next", LINEAR, _EXPERTS, _HEADS, _DELTA, shared_expert_intermediate_size=16, aux_loss=True),
    _family(
        "qwen3_5_moe_text",
        LINEAR,
        _EXPERTS,
        _HEADS,
        _DELTA,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        aux_loss=True,
    ),
    _family("olmoe", EXPERTS, _EXPERTS, aux_loss=True),
    _family("flex_olmo", EXPERTS, _EXPERTS, aux_loss=True),
    _family("gpt_oss", EXPERTS, _LOCAL, _HEADS, sliding_window=4, aux_loss=True),
    _family("phimoe", EXPERTS, _LOCAL, aux_loss=True),
    _family("granitemoe", EXPERTS, _LOCAL, aux_loss=True),
    _family("jetmoe", EXPERTS, _LOCAL, kv_channels=8, aux_loss=True),
    _family(
        "minimax", LINEAR, _LOCAL, _HEADS, block_size=8, layer_types=["linear_attention", "full_attention"] * 2, aux_loss=True
    ),
    _family("minimax_m2", EXPERTS, _LOCAL, _HEADS, rotary_dim=4, aux_loss=True),
    _family(
        "llama4_text", EXPERTS, _HEADS, num_local_experts=2, intermediate_size_mlp=48, moe_layers=[1, 3], attention_chunk_size=8
    ),
    _family("deepseek_v2", EXPERTS, _LATENT, _ROUTED, n_shared_experts=1, first_k_dense_replace=1),
    _family("deepseek_v3", EXPERTS, _LATENT, _ROUTED, n_shared_experts=1, first_k_dense_replace=1),
    _family("deepseek_v32", EXPERTS, _LATENT, _ROUTED, first_k_dense_replace=1, index_n_heads=2, index_head_dim=16, index_topk=8),
    _family("glm4_moe", EXPERTS, _HEADS, _ROUTED, first_k_dense_replace=1),
    _family("glm4_moe_lite", EXPERTS, _LATENT, _ROUTED),
    _family("dots1", EXPERTS, _HEADS, _ROUTED, first_k_dense_replace=1, n_shared_experts=1, sliding_window=4),
    _family(
        "ernie4_5_moe",
        EXPERTS,
        _HEADS,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        aux_loss=True,
    ),
    _family("hunyuan_v1_moe", EXPERTS, _HEADS, num_experts=4, moe_topk=2),
    _family("lfm2_moe", EXPERTS, _EXPERTS, layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    _family("cohere2_moe", EXPERTS, _EXPERTS, sliding_window=4),
    _family("afmoe", EXPERTS, _EXPERTS, _HEADS, num_dense_layers=1, sliding_window=4),
    _family("solar_open", EXPERTS, _HEADS, _ROUTED),
)

BY_TYPE = {family.model_type: family for family in FAMILIES}


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A config that must be refused, and a word that the reason must contain."""

    model_type: str
    reason: str
    changes: dict[str, Any] = field(default_factory=dict)
    because: str = ""


_VISION = {"vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}}

REFUSED: tuple[Refused, ...] = (
    Refused(
        model_type="gemma4_text",
        changes={**BY_TYPE["gemma4_text"].changes, "num_kv_shared_layers": 2},
        reason="changed between the layers",
        because="with `num_kv_shared_layers`: layers share key-value states",
    ),
    Refused(
        model_type="gemma3n_text",
        changes={
            **_HEADS,
            **_ALTERNATING,
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [48] * 4,
        },
        reason="hidden states of shape",
        because="four streams of hidden states, shared key-value states",
    ),
    Refused(
        model_type="zamba2",
        changes={
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "attention_head_dim": 16,
            "attention_hidden_size": 64,
        },
        reason="shared between layers",
        because="layers share parameters",
    ),
    Refused(model_type="gemma3", changes=_VISION, reason="vision_config", because="multimodal"),
    Refused(model_type="qwen3_5", changes=_VISION, reason="vision_config", because="multimodal"),
    Refused(model_type="llama4", changes=_VISION, reason="vision_config", because="multimodal"),
    Refused(model_type="idefics3", changes=_VISION, reason="vision_config", because="multimodal"),
    Refused(
        model_type="zaya",
        changes={"layer_types": ["hybrid"] * 4, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
        reason="state besides the hidden states",
        because="layers hand router states to each other",
    ),
    Refused(
        model_type="inkling2_text",
        changes={"head_dim": 8, "swa_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        reason="also goes to",
        because="hidden states of one layer reach later ones directly",
    ),
    Refused(model_type="bert", reason="looks ahead", because="an encoder"),
    Refused(model_type="bert-generation", reason="looks ahead", because="an encoder"),
    Refused(model_type="t5", reason="encoder-decoder", because="encoder-decoder"),
    Refused(model_type="bart", reason="encoder-decoder", because="encoder-decoder"),
)
