"""Regenerates ``tests/goldens/models/lf_rope.json`` by running LLaMA-Factory's ``rope_scaling`` on configs.

Run inside an environment that has LLaMA-Factory 0.9.5 (``docs/data.md``): ``python tests/oracles/lf_rope.py``. Each case holds a
kind, what the config says of its positions, the row length (null: a conversation), and what LLaMA-Factory makes of the config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "goldens/models/lf_rope.json"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PLAIN = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
STRETCHED = {
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
KINDS = ("linear", "dynamic", "yarn", "llama3")
CASES = [
    *((kind, PLAIN, tokens) for kind in KINDS for tokens in (32, 64, 65, 128, 200, None)),
    *((kind, STRETCHED, tokens) for kind in KINDS for tokens in (16, 50, 200, None)),
]


def outcome(kind: str, positions: dict[str, Any], tokens: int | None) -> dict[str, Any]:
    from llamafactory.hparams import ModelArguments
    from llamafactory.model.model_utils.rope import configure_rope
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen2", **SMALL, **json.loads(json.dumps(positions)))
    arguments = ModelArguments(model_name_or_path="none", rope_scaling=kind)
    arguments.model_max_length = tokens
    configure_rope(config, arguments)
    return {"max_position_embeddings": config.max_position_embeddings, "rope_parameters": dict(config.rope_parameters)}


if __name__ == "__main__":
    found = [{"kind": k, "positions": p, "tokens": t, "found": outcome(k, p, t)} for k, p, t in CASES]
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
