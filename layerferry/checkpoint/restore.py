"""Reading a checkpoint back into an engine, under whatever plan the engine has.

The weights come first, through ``layerferry.load(..., weights=folder)``, from the Hugging Face shards; ``restore`` adds what
those cannot hold. Parameters are found by name in whichever state file has them, so units may be cut otherwise, live
elsewhere, or compute in another type: an fp32 master that was split is joined for an fp32 run, and one that was whole has been
split by loading; both are exact. Moments in another number of bits are encoded or decoded, a master is rounded where fewer bits
are kept, and a line says so. Every file is summed before it is used, one tensor is in memory at a time, and whatever does not fit
raises ``CheckpointError`` before a step is taken. Checked by ``tests/checkpoint/test_exact.py``, ``test_damage.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from layerferry.checkpoint.contents import CODES, SEPARATOR, element_names, exponents_of, trained_names
from layerferry.checkpoint.manifest import Manifest
from layerferry.engine.engine import Engine
from layerferry.errors import CheckpointError
from layerferry.layout import BLOCK_ELEMENTS, RESIDUE, WEIGHT, Entry, Plane
from layerferry.master import join_master
from layerferry.optim.base import EXP_AVG_SQ
from layerferry.optim.blocks import decode, encode
from layerferry.store.safetensors_file import CheckpointFolder
from layerferry.units import Unit

STATE_PREFIX = "state-"
UNSIGNED_MOMENTS = (EXP_AVG_SQ,)

logger = logging.getLogger(__name__)


class OtherState(CheckpointError):
    """The checkpoint is whole, and of other settings than the run: an older one would not fit either."""


def check_weights(folder: Path, manifest: Manifest) -> None:
    """Sum everything but the state files: what is read before ``restore``."""
    check_files(folder, manifest, [name for name in manifest.files if not name.startswith(STATE_PREFIX)])


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Sum ``names``, files of the manifest."""
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="verify") as pool:
        for name in names:
            manifest.check_file(folder, name, pool)


def restore(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """Residues, optimizer planes and step number; the weights are there already."""
    _check_optimizer(engine, folder, manifest)
    _check_trained(engine, folder, manifest)
    state = _State(folder, manifest)
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="verify") as pool:
        state.check_names(engine, pool)
        for unit in engine.store.units:
            state.check_files(unit, pool)
            with engine.store.at_hand(unit):
                for entry in unit.layout.entries:
                    if entry.trained:
                        _restore_parameter(engine, unit, entry, state)
    engine.num_steps = manifest.step


def _restore_parameter(engine: Engine, unit: Unit, entry: Entry, state: _State) -> None:
    store, name = engine.store, unit.names[entry.name]
    for kind in engine.optimizer.state_planes:
        if kind != RESIDUE and store.plane(unit, kind).spec.takes(entry):
            _restore_moment(store.plane(unit, kind), kind, name, entry, state)
    if not state.has(RESIDUE, name):
        return  # the master was whole in the shard, and loading has split it where it must be
    residue, weight = state.read(RESIDUE, name, entry.shape), store.plane(unit, WEIGHT).view(entry)
    kept = store.plane(unit, RESIDUE).sections.get(entry.dtype)
    if kept is not None and kept.dtype == residue.dtype:
        store.plane(unit, RESIDUE).view(entry).copy_(residue)
        return
    high = weight.to(torch.bfloat16)
    if not torch.equal(high.float(), weight.float()):
        raise CheckpointError(f"{state.folder}: {name} has a residue, but its weight is no bf16 number: of different files")
    store.set_parameter(unit, entry, join_master(high, residue.to(weight.device)))


def _restore_moment(plane: Plane, kind: str, name: str, entry: Entry, state: _State) -> None:
    """As it was saved where the format is the same, else encoded or decoded, in blocks as planes have them."""
    values, blocks = state.read(kind, name, plane.spec.shape(entry)), -(-entry.numel // BLOCK_ELEMENTS)
    signed = kind not in UNSIGNED_MOMENTS
    if state.has(exponents_of(kind), name):
        exponents = state.read_exponents(kind, name, entry)
        if plane.spec.coded:
            plane.view(entry).copy_(values)
            plane.exponents_of(entry).copy_(exponents)
            return
        values = decode(_padded(values, blocks), exponents, signed=signed)[: entry.numel].view(entry.shape)
    elif plane.spec.coded:
        codes, exponents = encode(_padded(values, blocks), signed=signed)
        plane.exponents_of(entry).copy_(exponents)
        values = codes[: entry.numel].view(entry.shape)
    plane.view(entry).copy_(values)


def _padded(values: Tensor, blocks: int) -> Tensor:
    """[blocks * 128], zeros behind the last element: as planes are padded."""
    flat = values.reshape(-1)
    return torch.cat([flat, flat.new_zeros(blocks * BLOCK_ELEMENTS - flat.numel())])


class _State:
    """The tensors of all state files, by name."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self._manifest = folder, manifest
        self._files = {name: CheckpointFolder(folder / name) for name in manifest.files if name.startswith(STATE_PREFIX)}
        self._home = {tensor: name for name, file in self._files.items() for tensor in file.names}
        self._checked: set[str] = set()

    def has(self, kind: str, parameter: str) -> bool:
        return SEPARATOR.join((kind, parameter)) in self._home

    def check_names(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        """Every plane of each trained parameter: no more, no less. A name that a flipped bit has changed is
        damage, so the files are summed before anything else is said."""
        entries = [(unit.names[entry.name], entry) for unit in engine.store.units for entry in unit.layout.entries]
        expected = set()
        for kind, dtype in self._manifest.state_planes.items():
            spec = engine.optimizer.state_planes[kind]
            for one in (kind, exponents_of(kind)) if dtype == CODES else (kind,):
                expected |= {SEPARATOR.join((one, name)) for name, entry in entries if spec.takes(entry)}
        residues = {SEPARATOR.join((RESIDUE, name)) for name, entry in entries if entry.trained}
        missing = sorted(expected - set(self._home))
        surplus = sorted(set(self._home) - expected - residues)
        if missing or surplus:
            for file in self._files:
                self._manifest.check_file(self.folder, file, pool)
            what = f"{missing[0]} is missing" if missing else f"{surplus[0]} belongs to no parameter"
            raise OtherState(
                f"{self.folder}: the state of another model, or of other trained parameters (finetuning_type, freeze_...): {what}"
            )

    def check_files(self, unit: Unit, pool: ThreadPoolExecutor) -> None:
        """Sum the files that hold the state of ``unit``, once each."""
        names = set(unit.names.values())
        for tensor, file in self._home.items():
            if file not in self._checked and tensor.split(SEPARATOR, 1)[1] in names:
                self._manifest.check_file(self.folder, file, pool)
                self._checked.add(file)

    def read(self, kind: str, parameter: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor @host, of ``shape``."""
        return self._read(SEPARATOR.join((kind, parameter)), shape)

    def read_exponents(self, kind: str, parameter: str, entry: Entry) -> Tensor:
        """The exponents of a tensor of codes @host, one a block."""
        return self._read(SEPARATOR.join((exponents_of(kind), parameter)), (-(-entry.numel // BLOCK_ELEMENTS),))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._files[self._home[name]]
        if file.shape(name) != shape:
            raise OtherState(f"{file.path}: {name} has shape {file.shape(name)}, the model's has {shape}")
        return file.read(name)


def _check_optimizer(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """The optimizer must keep the very moments that were saved; in how many bits is its own affair."""
    own, saved = element_names(engine), dict(manifest.state_planes)
    if own.keys() != saved.keys() or not {*own.values(), *saved.values()} <= {"F32", CODES}:
        raise OtherState(
            f"{folder}: its optimizer kept {_planes(saved)}, this run's keeps {_planes(own)}: resume with the "
            "optimizer of the run, or start anew from its weights (model_name_or_path)"
        )
    if own != saved:
        logger.warning("%s: moments are converted: %s becomes %s", folder, _planes(saved), _planes(own))


def _check_trained(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """The very parameters must be trained that were, whatever the optimizer keeps of them: plain SGD on whole masters keeps
    nothing, and then no missing name would tell."""
    own, saved = set(trained_names(engine)), set(manifest.trained or ())
    if manifest.trained is None or own == saved:
        return
    sides = {"only it": saved - own, "only this run": own - saved}
    differences = [f"{which} {_some(names)}" for which, names in sides.items() if names]
    raise OtherState(
        f"{folder}: another model, or other trained parameters: {'; '.join(differences)}: resume with the finetuning_type and "
        "freeze_... of the run, or start anew from its weights (model_name_or_path)"
    )


def _some(names: set[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"trains {min(names)}{more}"


def _planes(planes: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {dtype}" for kind, dtype in planes.items()) or "nothing"
