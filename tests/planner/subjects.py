"""What the planner's tests plan for: tiny real models, and a machine with stated numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from layerferry.backends.cpu import CpuBackend
from layerferry.config import Config, EngineConfig, ModelConfig, TrainConfig
from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import Engine
from layerferry.layout import PlaneSpec
from layerferry.models.build import build_on_meta
from layerferry.models.frozen import freeze
from layerferry.models.skeleton import Skeleton
from layerferry.models.varlen import use_where_possible
from layerferry.optim.adamw import AdamW
from layerferry.optim.decay import decays
from layerferry.optim.reference import ReferenceKernels
from layerferry.plan import Plan
from layerferry.planner.books import Books
from layerferry.planner.choice import Choice
from layerferry.planner.facts import Model
from layerferry.planner.held import DEVICE, HOST
from layerferry.planner.machine import Machine, default_rates
from layerferry.planner.problem import Problem, fits, needs
from layerferry.planner.search import _base
from layerferry.store.store import Store, plane_specs

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
QWEN_3B = {
    **QWEN_7B,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
QWEN_14B = {
    **QWEN_7B,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
QWEN_MOE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "model_type": "qwen3_moe",
}  # fmt: skip
GPT_OSS = {
    "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
    "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "tie_word_embeddings": False,
    "model_type": "gpt_oss",
}  # fmt: skip
SHAPES = {"qwen3-30b-a3b": QWEN_MOE, "qwen2.5-3b": QWEN_3B, "qwen2.5-7b": QWEN_7B, "qwen2.5-14b": QWEN_14B}


def books_beside_the_table(question: Problem, some: Iterable[Choice]) -> Iterator[tuple[Plan, int, float]]:
    """Of each of ``some``: the plan that the books furnish, the bytes that they say are short, and their bound of its seconds.
    Their bytes are those of the byte table."""
    books, base = Books(question), _base(question)
    for choice in some:
        furnished, short = books.furnished(choice)
        plan = question.complete(furnished.on(base))
        places = needs(plan, question.machine)
        assert (books.host(furnished), books.device(furnished)) == (places[HOST][0], places[DEVICE][0])
        assert (short == 0) == fits(question, plan)
        yield plan, short, books.least_seconds(furnished)


def skeleton(
    model_type: str = "llama",
    *,
    fp32: bool = False,
    attention: str = "sdpa",
    frozen: dict[str, Any] | None = None,
    ours: bool = False,
    **overrides: Any,
) -> Skeleton:
    """``frozen``: keys of ``finetuning_type: freeze``. ``ours``: its attention comes through our interface."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**{**TINY, **overrides})
    dtype = torch.float32 if fp32 else torch.bfloat16
    model = build_on_meta(config, dtype=dtype, attention=attention)
    if frozen is not None:
        freeze(model, TrainConfig(finetuning_type="freeze", **frozen))
    assert not ours or use_where_possible(model, torch.device("cpu"))
    return Skeleton(model, decays=decays, device=torch.device("cpu"), fp32=fp32)


@functools.cache
def qwen(name: str, num_layers: int | None = None) -> Model:
    """A Qwen2.5 of two built layers, told how many it has: nothing but their number differs."""
    shape = {"model_type": "qwen2", **SHAPES[name]}
    count = num_layers or int(shape["num_hidden_layers"])
    small = Model.of(skeleton(**{**shape, "num_hidden_layers": 2}))
    layers = [replace(small.units[1], index=i + 1, name=f"layer.{i}") for i in range(count)]
    ends = [] if small.tied else [replace(small.units[-1], index=count + 1)]
    flops = replace(small.flops, layer_params=small.flops.layer_params * count // 2, attention=small.flops.attention[:1] * count)
    return replace(small, units=(small.units[0], *layers, *ends), behaviours=(0,) * count, flops=flops)


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


def uploaded_in_a_step(built: Skeleton, plan: Plan, batches: list[MicroBatch]) -> int:
    """Bytes of weights that the feed really uploads in a step after another one."""
    store = Store(built.units, specs(), CpuBackend(), on_device=plan.on_device)
    engine = Engine(built, store, AdamW(kernels=ReferenceKernels()), CpuBackend(), plan)
    try:
        engine.step(batches, lr=0.0)
        before = engine.feed.uploaded_bytes
        engine.step(batches, lr=0.0)
        return engine.feed.uploaded_bytes - before
    finally:
        engine.close()
