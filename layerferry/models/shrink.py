"""A small copy of any config that still shows every behaviour of the big one: what ``verify`` trains.

Widths, heads, experts and vocabulary become small numbers whose relations survive (grouped heads, latent ranks, groups of
experts); windows become shorter than the rows, so that they matter. Depth is the shortest prefix of layers that shows every
behaviour: the narrow model is built at full depth on ``meta`` and its layers' behaviour keys are compared. Lists with one value
per layer are cut to that prefix. Works on the config as a dict, by field name, because families agree on names and on little
else. Checked by ``tests/test_verify.py`` on real configs of some twenty families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layerferry.errors import ModelRefused
from layerferry.models.stack import find_stack
from layerferry.models.template import behaviour_key

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

WIDTH, HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY, EXPERTS, WINDOW = 64, 4, 16, 96, 256, 4, 8
MIN_LAYERS, MAX_LAYERS = 2, 16
"""At most so many layers: where every layer differs from all others, a longer prefix shows nothing new in kind."""

_AT_MOST: dict[str, int] = {
    name: value
    for names, value in (
        ("hidden_size n_embd n_embed d_model word_embed_proj_dim attention_hidden_size lru_width", WIDTH),
        ("conv_dim conv_dim_out intermediate_size_mlp shared_intermediate_size", WIDTH),
        ("num_attention_heads n_head n_heads num_heads swa_num_attention_heads mamba_num_heads attention_heads", HEADS),
        ("head_dim global_head_dim attention_head_dim kv_channels swa_head_dim v_head_dim swa_v_head_dim", HEAD_DIM),
        ("qk_nope_head_dim qk_rope_head_dim q_lora_rank kv_lora_rank index_topk", HEAD_DIM),
        ("linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head mamba_headdim", HEAD_DIM),
        ("index_head_dim", 2 * HEAD_DIM),
        ("rotary_dim", HEAD_DIM // 2),
        ("intermediate_size n_inner ffn_dim ffn_hidden_size hidden_dim dff dense_intermediate_size", FEED_FORWARD),
        ("moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size", WIDTH // 2),
        ("expert_ffn_hidden_size moe_latent_size", WIDTH // 2),
        ("num_local_experts num_experts n_routed_experts moe_num_experts", EXPERTS),
        ("num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k", EXPERTS // 2),
        ("n_group n_groups mamba_n_groups num_expert_group linear_num_key_heads", 2),
        ("topk_group n_shared_experts num_shared_experts moe_num_shared_experts", 1),
        ("sliding_window sliding_window_size attention_window_size attention_chunk_size window_size", WINDOW),
        ("chunk_size mamba_chunk_size block_size state_size mamba_d_state ssm_state_size", WINDOW),
        ("hidden_size_per_layer_input mamba_dt_rank time_step_rank index_n_heads", WINDOW // 2),
        ("original_max_position_embeddings", VOCABULARY // 4),
    )
    for name in names.split()
}
"""Field -> what it becomes where it was larger; so for each number where the field is a list."""

_SET = (
    *("vocab_size", "vocab_size_per_layer_input", "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    "max_sequence_length",
)
"""Fields that become VOCABULARY, smaller ones too: the rows of ``verify`` need so many ids and places."""

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_KEY_VALUE_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "kv_n_heads": "n_heads",
}
_RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")
_DROPPED = (
    "quantization_config",
    "transformers_version",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "id2label",
    "label2id",
)


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """The small copy, without randomness. Raises ``ModelRefused`` where the family cannot be built small."""
    facts = config.to_dict()
    if hasattr(config, "text_config"):
        raise ModelRefused(f"{config.model_type}: a model made of several; only text models are trained so far")
    narrow = _rebuilt(config, _narrowed(facts, facts))
    keys = _behaviours(narrow)
    full = len(keys)
    first_of_each = {key: index for index, key in reversed(list(enumerate(keys)))}
    depth = min(full, MAX_LAYERS, max(MIN_LAYERS, 1 + max(first_of_each.values())))
    return _rebuilt(config, _cut(narrow.to_dict(), full, depth))


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """The real model of ``config`` in fp32, no weight at a special value: a norm at 1 or a bias at 0 would hide a mistake."""
    import torch
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.train()
    return model


def _rebuilt(config: PretrainedConfig, facts: dict[str, Any]) -> PretrainedConfig:
    kept = {name: value for name, value in facts.items() if name not in _DROPPED and not name.startswith("_")}
    small: PretrainedConfig = type(config).from_dict(kept)
    return small


def _behaviours(config: PretrainedConfig) -> list[Any]:
    import torch

    from layerferry.models.build import build_on_meta

    model = build_on_meta(config, dtype=torch.float32)
    _, stack = find_stack(model, model.config)
    return [behaviour_key(layer) for layer in stack]


# -------------------------------------------------------------------- width


def _narrowed(facts: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """``facts`` (a config, or a dict inside one) with small numbers; ``whole`` is the config that relations are read from."""
    small: dict[str, Any] = {}
    for name, value in facts.items():
        if name in _DROPPED:
            continue
        if isinstance(value, dict):
            small[name] = _narrowed(value, whole)
        elif name in _SET:
            small[name] = VOCABULARY if isinstance(value, int) and value > 0 else value
        elif name in _AT_MOST:
            small[name] = _limited(value, _AT_MOST[name])
        elif name in _KEY_VALUE_HEADS:
            small[name] = _key_value_heads(value, whole.get(_KEY_VALUE_HEADS[name], whole.get("n_head")))
        elif name.endswith(("token_id", "token_index")):
            small[name] = _token(name, value)
        elif any(word in name for word in _RANDOM) and isinstance(value, float):
            small[name] = 0.0
        else:
            small[name] = value
    _relate(small, facts)
    return small


def _limited(value: Any, limit: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_limited(item, limit) for item in value]
    return min(value, limit) if isinstance(value, int) and not isinstance(value, bool) else value


def _key_value_heads(value: Any, heads: Any) -> Any:
    """Multi-head, grouped and multi-query attention stay what they are."""
    if not isinstance(value, int) or not isinstance(heads, int):
        return value
    small_heads = min(heads, HEADS)
    return small_heads if value >= heads else 1 if value == 1 else max(1, small_heads // 2)


def _token(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [2]
    if not isinstance(value, int):
        return value
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, 3)


def _relate(small: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """What follows from other fields: heads of state-space layers, value heads, rotary tables."""
    for expand, heads, dim in (("expand", "num_heads", "head_dim"), ("mamba_expand", "mamba_n_heads", "mamba_d_head")):
        if all(isinstance(small.get(name), int) for name in (expand, heads, dim)):
            small[heads] = small[expand] * WIDTH // small[dim]
            if small.get("mamba_d_ssm") is not None:
                small["mamba_d_ssm"] = small[expand] * WIDTH
    if isinstance(value_heads := facts.get("linear_num_value_heads"), int):
        grouped = value_heads > int(facts.get("linear_num_key_heads") or value_heads)
        small["linear_num_value_heads"] = small["linear_num_key_heads"] * (2 if grouped else 1)
    for name in ("short_factor", "long_factor"):
        if isinstance(small.get(name), list):
            share = float(facts.get("partial_rotary_factor") or 1.0)
            small[name] = small[name][: int(HEAD_DIM * share) // 2]
    if isinstance(small.get("mrope_section"), list):
        half = int(HEAD_DIM * float(facts.get("partial_rotary_factor") or 1.0)) // 2
        small["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


# -------------------------------------------------------------------- depth


def _cut(facts: dict[str, Any], full: int, depth: int) -> dict[str, Any]:
    """The first ``depth`` of ``full`` layers, in every field that speaks of layers."""
    small: dict[str, Any] = {}
    for name, value in facts.items():
        if name in _DROPPED:
            continue
        if name in _DEPTHS:
            small[name] = value * depth // full if isinstance(value, int) else value
        elif name == "attention_types":
            small[name] = [[["global", "local"], depth // 2]] if depth % 2 == 0 else [[value[0][0], 1]] * depth
        elif name == "num_kv_shared_layers":
            small[name] = min(value, depth // 2) if isinstance(value, int) else value
        elif isinstance(value, dict):
            small[name] = _cut(value, full, depth)
        elif isinstance(value, (list, tuple, str)) and len(value) == full:
            small[name] = value[:depth]
        elif _lists_layers(name, value):
            small[name] = [index for index in value if index < depth]
        elif name.endswith("_layer_end_index") and isinstance(value, int):
            small[name] = min(value, depth - 1)
        else:
            small[name] = value
    return small


def _lists_layers(name: str, value: Any) -> bool:
    speaks = any(word in name for word in ("layers", "indices", "layer_idx"))
    return speaks and isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value)
