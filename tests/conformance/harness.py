"""A real tiny model, the engine over a copy of it, and the gradients that the engine leaves in its planes."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerferry.backends.base import Backend
from layerferry.backends.chaos import ChaosBackend
from layerferry.engine.batch import IGNORE_INDEX, MicroBatch
from layerferry.engine.engine import Engine
from layerferry.engine.oracle import OtherSlots, drawing_by_place
from layerferry.layout import FP32_PLANE, GRAD
from layerferry.models.build import build_on_meta, fp32_only
from layerferry.models.frozen import freeze_alike
from layerferry.models.skeleton import Skeleton
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import Optimizer
from layerferry.optim.reference import ReferenceKernels
from layerferry.plan import Plan
from layerferry.store.scratch import ScratchFile
from layerferry.store.store import Store, plane_specs
from tests.store.files import MemoryFile

PLAN = Plan(fp32=True, num_slots=2, num_slabs=1)
"""Two slots, and with ``OtherSlots`` the backward of a layer always runs in the other one."""
SEED = 42
CORRECTIONS = ("e_score_correction_bias", "expert_bias")


def micro_batches(
    count: int = 2, *, rows: int = 2, tokens: int = 16, seed: int = 0, vocabulary: int = 96, padded: bool = True
) -> list[MicroBatch]:
    """Ragged label counts, and a padded last row. No id twice in a micro-batch but padding: sums of look-ups have one order."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = 3 + torch.randperm(vocabulary - 3, generator=generator)[: rows * tokens].view(rows, tokens)
        labels = ids.clone()
        labels[:, : 5 - 2 * (number % 3)] = IGNORE_INDEX
        lengths = torch.full((rows,), tokens)
        if padded and rows > 1:
            lengths[-1] = tokens - 4 - number % 2
            ids[-1, lengths[-1] :] = 0
            labels[-1, lengths[-1] :] = IGNORE_INDEX
        made.append(MicroBatch(input_ids=ids, labels=labels, lengths=lengths))
    return made


def real_model(config: Any, *, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """Random, no two values alike and none at a special point (norms at 1, biases at 0 would hide mistakes)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).train()
    wide = fp32_only(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if wide is not None and wide.search(name):
                parameter.data = parameter.data.float()
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        for name, buffer in model.named_buffers():
            if name.rpartition(".")[2] in CORRECTIONS:
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.05)
    return model


def seeded(model: Any) -> AbstractContextManager[None]:
    """Random numbers as a new engine draws them in its first step."""
    return drawing_by_place(model, step=0, seed=SEED)


_LAST: list[Any] = [None, None, None, None]
"""Model, dtype and attention that were asked for last, and what was built on ``meta`` for them: a copy is quicker."""


def _fresh(model: Any, dtype: torch.dtype) -> Any:
    attention = model.config._attn_implementation
    if _LAST[0] is not model or _LAST[1:3] != [dtype, attention]:
        _LAST[:] = model, dtype, attention, build_on_meta(model.config, dtype=dtype, attention=attention)
    fresh = copy.deepcopy(_LAST[3])
    freeze_alike(fresh, model)
    return fresh


def make_engine(
    model: Any,
    plan: Plan = PLAN,
    *,
    backend: Backend | None = None,
    optimizer: Optimizer | None = None,
    seed: int = SEED,
    other_slots: bool = False,
    scratch: ScratchFile | None = None,
) -> Engine:
    """The engine over a copy of ``model``'s weights. In fp32 mode with fp32 gradients @host."""
    backend = backend or ChaosBackend()
    dtype = torch.float32 if plan.fp32 else torch.bfloat16
    skeleton = Skeleton(_fresh(model, dtype), decays=lambda *_: True, device=backend.device, fp32=plan.fp32)
    optimizer = optimizer or AdamW(kernels=ReferenceKernels())
    specs = plane_specs(optimizer.state_planes, **({"grad": FP32_PLANE} if plan.carry_fp32 else {}))
    store = Store(
        skeleton.units,
        specs,
        backend,
        on_device=plan.on_device,
        on_disk=plan.on_disk,
        scratch=scratch or MemoryFile(Path()),
        keeps_gradients=not plan.on_arrival,
    )
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for unit in skeleton.units:
        with store.at_hand(unit):
            for entry in unit.layout.entries:
                store.set_parameter(unit, entry, parameters[unit.names[entry.name]].detach())
    for name in skeleton.buffer_names:
        skeleton.set_buffer(name, buffers[name])
    engine = Engine(skeleton, store, optimizer, backend, plan, seed=seed)
    if other_slots:
        OtherSlots.take_over(engine)
    return engine


def gradients(engine: Engine) -> dict[str, Tensor]:
    """What the last step drained, by model parameter name, as fp32; zeros for frozen parameters, as the oracle has them."""
    engine.settle()
    engine.backend.synchronize()
    found = {}
    for unit in engine.store.units:
        plane = engine.store.plane(unit, GRAD)
        for entry in unit.layout.entries:
            value = plane.view(entry).float().clone() if plane.holds(entry) else torch.zeros(entry.shape)
            found[unit.names[entry.name]] = value
    return found


def masters(engine: Engine) -> dict[str, Tensor]:
    """Every fp32 master by model parameter name, settled."""
    engine.settle()
    found = {}
    for unit in engine.store.units:
        with engine.store.at_hand(unit, writes=False):
            found |= {unit.names[entry.name]: engine.store.master(unit, entry) for entry in unit.layout.entries}
    return found


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Names whose values differ in any bit (NaN counts as different), with the largest difference."""
    assert one.keys() == other.keys()
    return {n: float((one[n].double() - other[n].double()).abs().max()) for n in one if not torch.equal(one[n], other[n])}


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, beside that of what is expected; zeros must be zeros."""
    difference = float((found.double() - expected.double()).norm())
    return difference / float(expected.double().norm()) if difference else 0.0


def masked(micro_batch: MicroBatch, rows: slice = slice(None)) -> MicroBatch:
    """The same tokens with no label in ``rows``."""
    labels = micro_batch.labels.clone()
    labels[rows] = IGNORE_INDEX
    return replace(micro_batch, labels=labels)
