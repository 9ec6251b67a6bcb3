"""Regenerates ``tests/goldens/models/lf_freeze.json`` by running LLaMA-Factory's ``finetuning_type: freeze`` on tiny models.

Run inside an environment that has LLaMA-Factory 0.9.5 (``docs/data.md``): ``python tests/oracles/lf_freeze.py``. Each case
holds a model type, changes to its config, the keys, and the names of the parameters that LLaMA-Factory trains, or null where it
raises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "goldens/models/lf_freeze.json"
SMALL = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
TIED = {"tie_word_embeddings": True}
GPT2 = {"n_embd": 8, "n_layer": 4, "n_head": 2}
MOE = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "head_dim": 4}
OPT = {"ffn_dim": 8, "word_embed_proj_dim": 8}

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {}),
    *[("llama", {}, {"freeze_trainable_layers": count}) for count in (1, 3, 9, -1, -3, -9, 0)],
    ("llama", {}, {"freeze_trainable_layers": 0, "freeze_extra_modules": "lm_head"}),
    *[("llama", {}, {"freeze_trainable_modules": names}) for names in ("mlp", "mlp,self_attn", "input_layernorm", "all,mlp")],
    *[("llama", {}, {"freeze_trainable_modules": names}) for names in (" mlp , self_attn ", "nonsense", "q_proj", "")],
    *[("llama", {}, {"freeze_extra_modules": names}) for names in ("lm_head", "embed_tokens", "norm", "lm_head,norm", "wte")],
    *[("llama", TIED, {"freeze_extra_modules": name}) for name in ("lm_head", "embed_tokens")],
    *[("llama", {}, {"use_llama_pro": True, "freeze_trainable_layers": count}) for count in (1, 2, 3, 4)],
    ("gpt2", GPT2, {"freeze_trainable_layers": 1, "freeze_trainable_modules": "mlp", "freeze_extra_modules": "ln_f"}),
    ("qwen3_moe", MOE, {"freeze_trainable_modules": "mlp"}),
    ("opt", OPT, {"freeze_trainable_layers": 1, "freeze_trainable_modules": "self_attn"}),
]


def trained(model_type: str, changes: dict[str, Any], keys: dict[str, Any]) -> list[str] | None:
    """Names that LLaMA-Factory leaves with ``requires_grad``; None where it refuses."""
    import torch
    from llamafactory.hparams import FinetuningArguments, ModelArguments
    from llamafactory.model.adapter import init_adapter
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **changes}))
    arguments = ModelArguments(model_name_or_path="none")
    arguments.compute_dtype = torch.float32
    try:
        freeze = FinetuningArguments(finetuning_type="freeze", **keys)
        model = init_adapter(model.config, model, arguments, freeze, True)
    except ValueError:
        return None
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


if __name__ == "__main__":
    OUT.parent.mkdir(parents=True, exist_ok=True)
    found = [{"model": m, "changes": c, "keys": k, "trained": trained(m, c, k)} for m, c, k in CASES]
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
