"""One unit of a model over scratch memory with random weights: what the benchmarks of a layer and of the head run on.

The objects are the engine's own (skeleton, planes, slots); only the store, and with it all movement, is missing. No more of
the model exists than a benchmark asks for.
"""

from __future__ import annotations

from typing import Any

import torch
from shapes import config_of
from torch import Tensor

from layerferry.backends.base import Backend
from layerferry.engine.feed import Slot
from layerferry.layout import FP32_PLANE, WEIGHT_PLANE, Plane
from layerferry.models.build import build_on_meta
from layerferry.models.embedding import EmbeddingTap
from layerferry.models.experts import use_where_needed
from layerferry.models.inputs import Inputs
from layerferry.models.skeleton import Skeleton
from layerferry.models.stack import LayerCall
from layerferry.models.varlen import use_where_possible
from layerferry.optim.decay import decays
from layerferry.units import Unit


def skeleton_of(model: str, backend: Backend, *, layers: int = 1) -> Skeleton:
    """The skeleton that the engine would make, with its attention and experts."""
    built = build_on_meta(config_of(model, layers=layers), dtype=torch.bfloat16)
    if backend.name == "cuda":
        use_where_needed(built)
        use_where_possible(built, backend.device)
    return Skeleton(built, decays=decays, device=backend.device)


def slot_for(unit: Unit, backend: Backend) -> Slot:
    """A slot of ``unit``'s size with random weights, the same in every slot."""
    slot = Slot(backend.device_buffer(unit.layout.bytes(WEIGHT_PLANE)))
    generator = torch.Generator(device=backend.device).manual_seed(unit.index)
    for section in Plane(unit.layout, WEIGHT_PLANE, slot.buffer).tensors():
        section.normal_(0.0, 0.02, generator=generator)
    return slot


def sums_for(unit: Unit, backend: Backend) -> Plane:
    """The fp32 accumulator of ``unit``, zero."""
    return Plane(unit.layout, FP32_PLANE, backend.device_buffer(unit.layout.bytes(FP32_PLANE)))


def bind(skeleton: Skeleton, unit: Unit, slot: Slot) -> list[Any]:
    return list(skeleton.bind(unit, Plane(unit.layout, WEIGHT_PLANE, slot.buffer)))


def first_layer_inputs(skeleton: Skeleton, backend: Backend, *, rows: int, row_tokens: int) -> tuple[Tensor, LayerCall]:
    """Hidden states [rows, row_tokens, D] @device of random tokens, and what the first layer is called with."""
    unit = skeleton.prologue_unit
    bind(skeleton, unit, slot_for(unit, backend))
    ids = backend.to_device(torch.randint(0, skeleton.vocab_size, (rows, row_tokens)))
    with torch.no_grad():
        hidden, calls = skeleton.prologue(Inputs(ids), EmbeddingTap(()))
    return hidden, calls[0]
