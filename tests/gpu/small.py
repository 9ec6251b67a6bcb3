"""Small models, batches and engines for the GPU suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import layerferry
from layerferry.backends.cuda import CudaBackend
from layerferry.config import Config, EngineConfig, ModelConfig, OptimConfig, TrainConfig
from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import Engine
from layerferry.layout import GRAD
from layerferry.plan import Plan

SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": {**SMALL, "tie_word_embeddings": True},
    "gemma2": {**SMALL, "head_dim": 64, "sliding_window": 32, "query_pre_attn_scalar": 64},
    "gpt_oss": {
        **SMALL,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "sliding_window": 32,
    },
    "qwen3_moe": {**SMALL, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


def model_of(family: str, dtype: torch.dtype, **changes: Any) -> Any:
    """Of one seed, which are other numbers in bf16 than in fp32 (torch before 2.13): see ``twins_of``."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**FAMILIES[family], **changes}), dtype=dtype)
    return model.cuda().train()


def twins_of(family: str) -> tuple[Any, Any]:
    """The same bf16 numbers in fp32 and in bf16. Every expert is chosen: of some only, a rounding decides for one token in a
    hundred which they are, and gradients jump."""
    changes = {"num_experts_per_tok": 4} if "num_experts_per_tok" in FAMILIES[family] else {}
    exact, half = (model_of(family, dtype, **changes) for dtype in (torch.float32, torch.bfloat16))
    half.load_state_dict(exact.state_dict())
    exact.load_state_dict(half.state_dict())
    return exact, half


def batches(count: int = 3, rows: int = 4, tokens: int = 128, seed: int = 0) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        ids = torch.randint(3, 1024, (rows, tokens), generator=generator)
        labels = ids.clone()
        labels[:, : 10 * number] = -100
        found.append(MicroBatch(input_ids=ids, labels=labels, lengths=torch.full((rows,), tokens)))
    return found


def engine_of(model: Any, plan: Plan, *, optim: OptimConfig | None = None, disk_folder: Path | None = None) -> Engine:
    config = Config(
        model=ModelConfig(model_name_or_path="live"),
        optim=optim or OptimConfig(),
        train=TrainConfig(fp32=plan.fp32),
        engine=EngineConfig(disk_folder=None if disk_folder is None else str(disk_folder)),
    )
    return layerferry.load(model, config=config, plan=plan, backend=CudaBackend())


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    engine.backend.synchronize()
    return {
        unit.names[entry.name]: engine.store.plane(unit, GRAD).view(entry).float().clone()
        for unit in engine.store.units
        for entry in unit.layout.entries
    }


def assert_places_do_not_matter(optim: OptimConfig | None = None) -> None:
    """Three steps with no, some and all units at home on the device leave the same masters."""
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for home in ((), (0, 2, 3), tuple(range(7))):
            engine = engine_of(model_of("llama", torch.bfloat16), Plan(num_slots=2, on_device=home), optim=optim)
            for number in range(3):
                engine.step(batches(seed=number), lr=1e-3)
            engine.settle()
            found.append([engine.store.master(u, e).cpu() for u in engine.store.units for e in u.layout.entries])
            engine.close()
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
