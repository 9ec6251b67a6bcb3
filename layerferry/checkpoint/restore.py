"""Reading a checkpoint back into an engine, under whatever plan the engine has.

The weights come first, through ``layerferry.load(..., weights=folder)``, from the Hugging Face shards; ``restore`` adds what
those cannot hold. Parameters are found by name in whichever state file has them, so units may be cut otherwise, live
elsewhere, or compute in another type: an fp32 master that was split is joined for an fp32 run, and one that was whole has been
split by loading; both are exact. Every file is summed before it is used, one tensor is in memory at a time, and whatever does
not fit raises ``CheckpointError`` before a step is taken. Checked by ``tests/checkpoint/test_exact.py``, ``test_damage.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from layerferry.checkpoint.contents import SEPARATOR, element_names
from layerferry.checkpoint.manifest import Manifest
from layerferry.engine.engine import Engine
from layerferry.errors import CheckpointError
from layerferry.layout import RESIDUE, WEIGHT, Entry
from layerferry.master import join_master
from layerferry.store.safetensors_file import CheckpointFolder
from layerferry.units import Unit

STATE_PREFIX = "state-"


def check_weights(folder: Path, manifest: Manifest) -> None:
    """Sum everything but the state files: what is read before ``restore``."""
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="verify") as pool:
        for name in manifest.files:
            if not name.startswith(STATE_PREFIX):
                manifest.check_file(folder, name, pool)


def restore(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """Residues, optimizer planes and step number; the weights are there already."""
    _check_optimizer(engine, folder, manifest)
    state = _State(folder, manifest)
    state.check_names(engine)
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="verify") as pool:
        for unit in engine.store.units:
            state.check_files(unit, pool)
            for entry in unit.layout.entries:
                _restore_parameter(engine, unit, entry, state)
    engine.num_steps = manifest.step


def _restore_parameter(engine: Engine, unit: Unit, entry: Entry, state: _State) -> None:
    store, name = engine.store, unit.names[entry.name]
    for kind in engine.optimizer.state_planes:
        store.plane(unit, kind).view(entry).copy_(state.read(kind, name, entry))
    if not state.has(RESIDUE, name):
        return  # the master was whole in the shard, and loading has split it where it must be
    residue = state.read(RESIDUE, name, entry)
    if entry.dtype != torch.float32:
        store.plane(unit, RESIDUE).view(entry).copy_(residue)
        return
    weight = store.plane(unit, WEIGHT).view(entry)
    high = weight.to(torch.bfloat16)
    if not torch.equal(high.float(), weight):
        raise CheckpointError(f"{state.folder}: {name} has a residue, but its weight is no bf16 number: of different files")
    weight.copy_(join_master(high, residue.to(weight.device)))


class _State:
    """The tensors of all state files, by name."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self._manifest = folder, manifest
        self._files = {name: CheckpointFolder(folder / name) for name in manifest.files if name.startswith(STATE_PREFIX)}
        self._home = {tensor: name for name, file in self._files.items() for tensor in file.names}
        self._checked: set[str] = set()

    def has(self, kind: str, parameter: str) -> bool:
        return SEPARATOR.join((kind, parameter)) in self._home

    def check_names(self, engine: Engine) -> None:
        """The same parameters, and every plane of each: no more, no less."""
        parameters = {unit.names[entry.name] for unit in engine.store.units for entry in unit.layout.entries}
        kinds = [*self._manifest.state_planes]
        expected = {SEPARATOR.join((kind, name)) for kind in kinds for name in parameters}
        residues = {SEPARATOR.join((RESIDUE, name)) for name in parameters}
        missing = sorted(expected - set(self._home))
        surplus = sorted(set(self._home) - expected - residues)
        if missing or surplus:
            what = f"{missing[0]} is missing" if missing else f"{surplus[0]} belongs to no parameter"
            raise CheckpointError(f"{self.folder}: the state of another model: {what}")

    def check_files(self, unit: Unit, pool: ThreadPoolExecutor) -> None:
        """Sum the files that hold the state of ``unit``, once each."""
        names = set(unit.names.values())
        for tensor, file in self._home.items():
            if file not in self._checked and tensor.split(SEPARATOR, 1)[1] in names:
                self._manifest.check_file(self.folder, file, pool)
                self._checked.add(file)

    def read(self, kind: str, parameter: str, entry: Entry) -> Tensor:
        """One tensor @host, of ``entry.shape``."""
        name = SEPARATOR.join((kind, parameter))
        file = self._files[self._home[name]]
        if file.shape(name) != entry.shape:
            raise CheckpointError(f"{file.path}: {name} has shape {file.shape(name)}, the model's has {entry.shape}")
        return file.read(name)


def _check_optimizer(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """The optimizer must keep the very planes that were saved."""
    own: Mapping[str, str] = element_names(engine)
    if dict(own) != dict(manifest.state_planes):
        raise CheckpointError(
            f"{folder}: its optimizer kept {_planes(manifest.state_planes)}, this run's keeps {_planes(own)}: resume with the "
            "optimizer of the run, or start anew from its weights (model_name_or_path)"
        )


def _planes(planes: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {dtype}" for kind, dtype in planes.items()) or "nothing"
