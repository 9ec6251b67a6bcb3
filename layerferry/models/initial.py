"""Random weights, unit by unit, by the family's own rule: training from scratch, and benchmarks at a model's real shape.

``_init_weights`` of the real model runs on fp32 modules of one unit at a time, so a model far larger than memory is never
built. Seeded by (seed, unit): the values do not depend on which units were made before. Checked by
``tests/models/test_initial.py``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from layerferry.models.skeleton import Skeleton
from layerferry.plan import size_text
from layerferry.units import Unit

log = logging.getLogger(__name__)


def initial_parameters(skeleton: Skeleton, unit: Unit, *, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(layout entry name, fp32 value @device) for every parameter of ``unit``; on the CPU, with other values and a line that says
    so, where the device has no room for them."""
    try:
        yield from _drawn(skeleton, unit, seed, device)
        return
    except torch.OutOfMemoryError:
        if device.type == "cpu":
            raise
    # the handler is left before: its traceback holds what was allocated
    log.warning(
        "%s: its %s of random values in fp32 do not fit the device: they are drawn on the CPU, which has other random numbers",
        *(unit.name, size_text(4 * unit.numel)),
    )
    yield from _drawn(skeleton, unit, seed, torch.device("cpu"))


def _drawn(skeleton: Skeleton, unit: Unit, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    rule: Any = _initialiser(skeleton)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        if unit.is_layer:
            yield from _of_layer(skeleton.layers[skeleton.layer_units.index(unit)], unit, rule, device)
        else:
            yield from _of_end(skeleton, unit, rule, device)


def _of_layer(layer: nn.Module, unit: Unit, rule: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    module = copy.deepcopy(layer)
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[leaf] = nn.Parameter(torch.zeros(parameter.shape, dtype=torch.float32, device=device))
        for leaf, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[leaf] = buffer.to(device)
    for part in reversed(list(module.modules())):  # children first, as transformers applies it
        rule(part)
    values = dict(module.named_parameters())
    for entry in unit.layout.entries:
        yield entry.name, values[entry.name].detach()


def _of_end(skeleton: Skeleton, unit: Unit, rule: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for entry in unit.layout.entries:
        fresh = nn.Parameter(torch.zeros(entry.shape, dtype=torch.float32, device=device))
        with skeleton.lent(unit.names[entry.name], fresh) as owner:
            rule(owner)
        yield entry.name, fresh.detach()


def _initialiser(skeleton: Skeleton) -> Any:
    """``_init_weights`` of the innermost model that holds the layers."""
    from transformers import PreTrainedModel

    holders = [
        module
        for name, module in skeleton.model.named_modules()
        if isinstance(module, PreTrainedModel) and f"{skeleton.stack_name}.".startswith(f"{name}." if name else "")
    ]
    return holders[-1]._init_weights
