"""Tiny engines on the CPU, batches by number, and the whole state of an engine as bytes by name."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import layerferry
from layerferry.backends import Backend
from layerferry.backends.cpu import CpuBackend
from layerferry.checkpoint.manifest import Manifest
from layerferry.checkpoint.restore import check_weights, restore
from layerferry.checkpoint.save import Saved, Saver
from layerferry.config import Config, EngineConfig, ModelConfig, OptimConfig, TrainConfig
from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import Engine
from layerferry.layout import GRAD, RESIDUE, WEIGHT
from layerferry.plan import Plan
from tests.models.tiny_models import tiny_model

RUN = "0123456789abcdef"
LR = 3e-3

PLANS = {
    "streamed": Plan(num_slots=2, num_slabs=1),
    "resident": Plan(num_slots=4, num_slabs=3, activation_budget=0.0),
    "waves": Plan(num_waves=2, resident_gradients=True, optimizer_threads=2),
    "home": Plan(on_device=(0, 2), num_slots=2),
    "all at home": Plan(on_device=(0, 1, 2, 3)),
    "disk": Plan(on_disk=(1, 2, 3), num_slots=2),
    "device and disk": Plan(on_device=(0,), on_disk=(2, 3), num_slots=2),
}
"""Plans with one sequence of bits: they differ in places, counts and recomputation."""


def model_of(family: str = "llama", **changes: Any) -> Any:
    return tiny_model(family, dtype=torch.bfloat16, **changes).train()


def engine_of(
    model: Any,
    plan: Plan | None = None,
    *,
    fp32: bool = False,
    weights: Path | None = None,
    backend: Backend | None = None,
    **optim: Any,
) -> Engine:
    """``optim``: fields of ``OptimConfig``."""
    plan = replace(plan or PLANS["streamed"], fp32=fp32)
    units = 3 if model.config.tie_word_embeddings else 4
    on_device, on_disk = (tuple(index for index in places if index < units) for places in (plan.on_device, plan.on_disk))
    plan = replace(plan, on_device=on_device, on_disk=on_disk)
    config = Config(
        model=ModelConfig(model_name_or_path="live"),
        optim=OptimConfig(**optim),
        train=TrainConfig(fp32=fp32),
        engine=EngineConfig(disk_folder=tempfile.gettempdir()),
    )
    return layerferry.load(model, config=config, plan=plan, backend=backend or CpuBackend(), weights=weights)


def batch_of(step: int, *, rows: int = 2, count: int = 2) -> list[MicroBatch]:
    """The micro-batches of step ``step``: ids by number, some tokens without loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = []
    for number in range(count):
        ids = torch.randint(3, 96, (rows, 16), generator=generator)
        labels = ids.clone()
        labels[:, : 3 * number] = -100
        found.append(MicroBatch(input_ids=ids, labels=labels, lengths=torch.full((rows,), 16)))
    return found


def train(engine: Engine, steps: range) -> list[tuple[float, float]]:
    """(loss, norm) of each step."""
    reports = [engine.step(batch_of(step), lr=LR * (1 + step % 3)) for step in steps]
    return [(report.loss, report.grad_norm) for report in reports]


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Master (fp32 bits, joined) and optimizer planes by parameter name, and the weights that the device computes with."""
    engine.settle()
    found = {}
    for unit in engine.store.units:
        with engine.store.at_hand(unit, writes=False) as planes:
            for entry in unit.layout.entries:
                name = unit.names[entry.name]
                found[f"master {name}"] = engine.store.master(unit, entry)
                for kind, plane in planes.items():
                    if kind not in (GRAD, WEIGHT, RESIDUE) and plane.holds(entry):
                        found[f"{kind} {name}"] = plane.view(entry).clone()
                        if plane.spec.coded:
                            found[f"{kind} exponents {name}"] = plane.exponents_of(entry).clone()
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), f"{name}: other bits"


def save(engine: Engine, folder: Path, step: int, **options: Any) -> Saved:
    """One checkpoint, waited for."""
    saver = Saver(engine, folder, run=RUN, **options)
    saver.start(step, {})
    outcome = saver.take_outcome(wait=True)
    saver.close()
    assert outcome is not None
    return outcome


def finished(saver: Saver, model: Any, steps: int) -> Engine:
    """Waits for a checkpoint, closes ``saver``, and holds it to what ``steps`` plain steps leave; the engine that took those."""
    saved = saver.take_outcome(wait=True)
    saver.close()
    assert saved is not None and saved.fault is None
    plain = engine_of(model)
    train(plain, range(steps))
    assert_same(state_of(load(model, saved.folder)), state_of(plain))
    return plain


def load(
    model: Any, folder: Path, plan: Plan | None = None, *, fp32: bool = False, backend: Backend | None = None, **optim: Any
) -> Engine:
    """An engine that takes up ``folder``, as the trainer does it."""
    manifest = Manifest.read(folder)
    manifest.check_sizes(folder)
    check_weights(folder, manifest)
    engine = engine_of(model, plan, fp32=fp32, weights=folder, backend=backend, **optim)
    restore(engine, folder, manifest)
    return engine
