"""What the planner's tests plan for: tiny real models, and a machine with stated numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from layerferry.config import Config, EngineConfig, ModelConfig, TrainConfig
from layerferry.layout import PlaneSpec
from layerferry.models.build import build_on_meta
from layerferry.models.skeleton import Skeleton
from layerferry.optim.adamw import AdamW
from layerferry.optim.decay import decays
from layerferry.planner.machine import Machine, default_rates
from layerferry.store.store import plane_specs

GIB = 2**30
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def skeleton(model_type: str = "llama", *, fp32: bool = False, attention: str = "sdpa", **overrides: Any) -> Skeleton:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**{**TINY, **overrides})
    dtype = torch.float32 if fp32 else torch.bfloat16
    model = build_on_meta(config, dtype=dtype, attention=attention)
    return Skeleton(model, decays=decays, device=torch.device("cpu"), fp32=fp32)


def specs() -> dict[str, PlaneSpec]:
    return plane_specs(AdamW().state_planes)


def machine(*, device_gib: float = 139.0, host_gib: float = 126.0, cpu: bool = False, **changes: Any) -> Machine:
    """An H200 beside 16 cores, or 16 cores alone; budgets count to the last byte."""
    name = "16 cores" if cpu else "NVIDIA H200"
    host, device = int(host_gib * GIB), int((host_gib if cpu else device_gib) * GIB)
    found = Machine(
        backend="cpu" if cpu else "cuda",
        device_name=name,
        device_available=device,
        device_total=device,
        device_source="MemAvailable" if cpu else "device_memory",
        host_available=host,
        host_total=host,
        host_source="host_memory",
        locked_limit=None,
        cores=16,
        **default_rates(name, on_cpu=cpu),
    )
    return replace(found, **changes)


def config(*, rows: int = 8, accumulation: int = 1, train: dict[str, Any] | None = None, **engine: Any) -> Config:
    return Config(
        model=ModelConfig(model_name_or_path="none"),
        train=TrainConfig(per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, **(train or {})),
        engine=EngineConfig(**engine),
    )
