"""Real shapes of the models that are measured; weights are random."""

from __future__ import annotations

from typing import Any

QWEN25 = {"vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096, "tie_word_embeddings": False,
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
}  # fmt: skip


def config_of(name: str, *, layers: int | None = None) -> Any:
    """The Hugging Face config of a shape, with fewer layers where asked."""
    from transformers import CONFIG_MAPPING

    shape = dict(SHAPES[name])
    if layers is not None:
        shape["num_hidden_layers"] = layers
    config = CONFIG_MAPPING[shape.pop("model_type")](**shape)
    config.architectures = None
    return config
