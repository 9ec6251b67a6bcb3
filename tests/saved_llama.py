"""A folder as a user has one: a Llama of two layers with random weights, and our small tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parent / "goldens" / "data" / "tokenizer"


def save_llama(folder: Path, *, more_rows: int = 0, **changes: Any) -> Path:
    """``more_rows``: of the embedding than the tokenizer has tokens."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    sizes = {
        "vocab_size": len(tokenizer) + more_rows,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
