"""Heads of tiny models, bound to their weights, with an accumulator: what an objective is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerferry.engine.batch import IGNORE_INDEX, MicroBatch
from layerferry.engine.engine import Engine
from layerferry.layout import FP32_PLANE, WEIGHT, Plane
from layerferry.objectives.head import Head
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import make_engine, real_model

ROWS, TOKENS, WIDTH, VOCABULARY = 2, 16, 32, 96

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "soft-capped": ("gemma2", {"final_logit_softcapping": 2.0}),
    "scaled": ("cohere", {"logit_scale": 0.0625}),
    "divided": ("granite", {"logits_scaling": 4.0}),
    "biased": ("phi", {}),
    "layer norm": ("gpt_neox", {}),
}


def head_of(name: str, chunk_tokens: int = 4096) -> tuple[Any, Engine, Head]:
    """The real model, an engine over a copy (to be closed), and its head."""
    model_type, changes = HEADS[name]
    model = real_model(tiny_config(BY_TYPE[model_type], num_hidden_layers=1, **changes))
    engine = make_engine(model)
    unit = engine.skeleton.epilogue_unit
    parameters = engine.skeleton.bind(unit, engine.store.plane(unit, WEIGHT))
    accumulator = Plane(unit.layout, FP32_PLANE, torch.zeros(unit.layout.bytes(FP32_PLANE), dtype=torch.uint8))
    return model, engine, Head(engine.skeleton, parameters, accumulator, chunk_tokens)


def hidden_states(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3


def batch() -> MicroBatch:
    """Labels from the ignored to the last of the vocabulary, with holes."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, :5] = IGNORE_INDEX
    labels[0, 9] = IGNORE_INDEX
    labels[1, -3:] = IGNORE_INDEX
    labels[0, -1], labels[0, -2] = 0, VOCABULARY - 1
    return MicroBatch(input_ids=ids, labels=labels, lengths=torch.full((ROWS,), TOKENS))


def collected(head: Head) -> dict[str, Tensor]:
    assert head.accumulator is not None
    return {entry.name: head.accumulator.view(entry).clone() for entry in head.accumulator.layout.entries}
