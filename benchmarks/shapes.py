"""Real shapes of the models that are measured; weights are random. Checked by ``tests/test_benchmarks.py`` against the
published parameter counts."""

from __future__ import annotations

from typing import Any

QWEN25 = {"vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "smollm2-1.7b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, **QWEN25, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2, **QWEN25, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4, **QWEN25,
    },
    "qwen2.5-14b": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8, **QWEN25,
    },
    "qwen2.5-32b": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8, **QWEN25,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "tie_word_embeddings": False,
    },
}  # fmt: skip


WIDENED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
"""What grows with ``width``: the size of a head stays, as in real families."""


def config_of(name: str, *, layers: int | None = None, width: float = 1.0, vocab: int | None = None) -> Any:
    """The Hugging Face config of a shape; where asked with another depth, width (a factor) or vocabulary."""
    from transformers import CONFIG_MAPPING

    shape = dict(SHAPES[name])
    for key in WIDENED:
        wide = shape[key] * width
        if wide != int(wide):
            raise SystemExit(f"--width {width}: {key} of {name} would be {wide}, which is not a whole number")
        shape[key] = int(wide)
    if layers is not None:
        shape["num_hidden_layers"] = layers
    if vocab is not None:
        shape["vocab_size"] = vocab
    config = CONFIG_MAPPING[shape.pop("model_type")](**shape)
    config.architectures = None
    return config
