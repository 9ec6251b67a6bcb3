"""Optimizer state @disk: the same run with the same bits, whatever of it is there, and one error where the disk fails."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.backends.base import Lane
from layerferry.backends.chaos import ChaosBackend
from layerferry.backends.cpu import CpuBackend
from layerferry.engine.engine import Engine
from layerferry.errors import DiskTierError
from layerferry.layout import GRAD, RESIDUE
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import Optimizer
from layerferry.optim.formats import StateFormat
from layerferry.optim.muon import Muon
from layerferry.optim.sgd import SGD
from layerferry.optim.verified import VerifiedOptimizer
from layerferry.plan import Plan
from layerferry.store.away import AwayError
from layerferry.store.disk import RING
from layerferry.store.scratch import ScratchFile
from layerferry.store.store import state_bytes
from tests.conformance.harness import make_engine, micro_batches
from tests.engine.small import clipped_steps, same, small_model, state
from tests.store.files import BreakingFile, MemoryFile, flip

BASE = Plan(num_slots=2, num_slabs=1)
STEPS = 3
LEAN = StateFormat(master="24bit", moments="8bit")
FORMATS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: AdamW(weight_decay=0.1),
    "adamw, 8 bits": lambda: AdamW(state_format=LEAN, weight_decay=0.1),
    "sgd: residues only": lambda: SGD(weight_decay=0.1),
    "muon": lambda: Muon(weight_decay=0.1),
    "verified": lambda: VerifiedOptimizer(AdamW()),
}
EVERY = (0, 1, 2, 3, 4)


def run(
    plan: Plan,
    *,
    chaos: int | None = None,
    optimizer: Optimizer | None = None,
    model: Any = None,
    scratch: ScratchFile | None = None,
) -> Any:
    backend = CpuBackend() if chaos is None else ChaosBackend(chaos)
    scratch = scratch or MemoryFile(Path())
    engine = make_engine(model or small_model(), plan, backend=backend, optimizer=optimizer, scratch=scratch)
    return clipped_steps(engine, STEPS)


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_bits_with_none_some_and_all_units_on_the_disk(name: str) -> None:
    """Every format: tests/engine/test_invariance.py. Updates on arrival: test_arrivals.py."""
    expected = run(BASE, optimizer=FORMATS[name]())
    for seed, on_disk in enumerate(((3,), (1, 2, 3), EVERY)):
        seen, left = run(replace(BASE, on_disk=on_disk), chaos=seed, optimizer=FORMATS[name]())
        assert seen == expected[0] and same(left, expected[1])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_through_a_real_disk(tmp_path: Path, name: str) -> None:
    expected = run(BASE, optimizer=FORMATS[name]())
    seen, left = run(replace(BASE, on_disk=EVERY), chaos=3, optimizer=FORMATS[name](), scratch=ScratchFile(tmp_path))
    assert seen == expected[0] and same(left, expected[1])


@pytest.mark.parametrize(
    "changes",
    [{"num_waves": 2, "carry_fp32": True}, {"on_device": (0, 1)}, {"optimizer_threads": 2, "num_slots": 5}, {"host_inputs": 2}],
)
def test_beside_everything_else_that_a_plan_may_do(changes: dict[str, Any]) -> None:
    plan = replace(BASE, row_tokens=16, rows_per_step=8, micro_batch_rows=2, **changes)
    expected = run(plan)
    seen, left = run(replace(plan, on_disk=(2, 3, 4)), chaos=1)
    assert seen == expected[0] and same(left, expected[1])


@pytest.mark.parametrize("part", ["layers.1.", ".mlp.", "embed_tokens"])
def test_frozen_parameters_have_nothing_on_the_disk(part: str) -> None:
    def frozen() -> Any:
        model = small_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part in name)
        return model

    expected = run(BASE, model=frozen())
    seen, left = run(replace(BASE, on_disk=EVERY), chaos=2, model=frozen())
    assert seen == expected[0] and same(left, expected[1])
    engine = make_engine(frozen(), replace(BASE, on_disk=EVERY))
    assert engine.store.on_disk == {unit.index for unit in engine.store.units if unit.num_trained}
    engine.close()


def test_an_optimizer_without_state_has_no_file(tmp_path: Path) -> None:
    engine = make_engine(small_model(), replace(BASE, fp32=True, on_disk=EVERY), optimizer=SGD(), scratch=ScratchFile(tmp_path))
    assert engine.store.disk is None and not engine.store.on_disk
    engine.close()


def test_a_step_moves_each_unit_once_each_way_and_loading_bf16_weights_moves_nothing(tmp_path: Path) -> None:
    model = small_model(dtype=torch.bfloat16, layers=6)
    engine = make_engine(model, replace(BASE, on_disk=tuple(range(1, 7))), scratch=ScratchFile(tmp_path))
    tier = engine.store.disk
    assert tier is not None
    specs = engine.store.specs
    assert tier.num_bytes >= sum(state_bytes(unit, specs) for unit in engine.store.units[1:7])
    assert tier.num_bytes < sum(state_bytes(unit, specs) + 4096 for unit in engine.store.units[1:7])
    moved = []
    for step in range(3):
        engine.step(micro_batches(2, seed=step), lr=1e-2)
        engine.settle()
        tier.settle()
        moved.append((tier.bytes_read, tier.bytes_written))
    ahead = moved[0][0]
    assert moved == [
        (ahead, tier.num_bytes),
        (ahead + tier.num_bytes, 2 * tier.num_bytes),
        (ahead + 2 * tier.num_bytes, 3 * tier.num_bytes),
    ]
    assert 0 < ahead < tier.num_bytes, "of the first step nothing was there to be read; the first units of the second were"
    engine.close()


def test_planes_on_the_disk_are_neither_read_nor_written_by_accident() -> None:
    engine = make_engine(small_model(dtype=torch.bfloat16), replace(BASE, on_disk=(1,)))
    unit = engine.store.units[1]
    entry, store = unit.layout.entries[0], engine.store
    for use in (lambda: store.master(unit, entry), lambda: store.set_parameter(unit, entry, torch.ones(entry.shape))):
        with pytest.raises(AwayError, match=rf"residue of {unit.name} is @disk: .*at_hand"):
            use()
    with engine.store.at_hand(unit, writes=False) as planes:
        assert planes[RESIDUE].buffer.device.type == "cpu"
        assert engine.store.plane(unit, RESIDUE) is planes[RESIDUE]
    engine.close()


@pytest.mark.parametrize("chaos", [None, 4])
def test_updates_in_stages_and_a_checkpoint_have_the_whole_ring_at_once(
    monkeypatch: pytest.MonkeyPatch, chaos: int | None
) -> None:
    """The worker has one unit between its halves and another that it begins, the reader of a checkpoint a third: nobody waits for
    ever, what is read stays, and the bits are those of a run without a disk."""
    expected = run(BASE, optimizer=Muon())
    backend = CpuBackend() if chaos is None else ChaosBackend(chaos)
    engine = make_engine(
        small_model(), replace(BASE, on_disk=EVERY), backend=backend, optimizer=Muon(), scratch=MemoryFile(Path())
    )
    tier, counting, at_hand, most = engine.store.disk, threading.Lock(), set[int](), 0
    assert tier is not None
    real = tier.at_hand

    @contextmanager
    def counted(unit: int, *, writes: bool) -> Iterator[torch.Tensor]:
        nonlocal most
        with real(unit, writes=writes) as memory:
            with counting:
                at_hand.add(unit)
                most = max(most, len(at_hand))
            yield memory
            with counting:
                at_hand.discard(unit)

    monkeypatch.setattr(tier, "at_hand", counted)
    *others, last = engine.update_order
    seen: list[float] = []
    for step in range(STEPS):
        hold = engine.deferred.hold(last)  # as a checkpoint does
        try:
            backend.wait(Lane.HOST, hold.settled.result(20))
            with engine.store.at_hand(last, writes=False) as planes:
                before = {kind: plane.buffer.clone() for kind, plane in planes.items() if kind != GRAD}
                report = engine.step(micro_batches(4, seed=step), lr=1e-2 / (1 + step), max_grad_norm=0.5)
                for unit in others:
                    backend.wait(Lane.HOST, engine.deferred.ready(unit).result(20))
                assert all(torch.equal(planes[kind].buffer, buffer) for kind, buffer in before.items())
        finally:
            hold.released.set_result(backend.record(Lane.HOST))
        seen += [report.loss, report.grad_norm]
    left = state(engine)
    engine.close()
    assert most == RING and seen == expected[0] and same(left, expected[1])


# ---------------------------------------------------------------- a disk that fails


def until_it_fails(engine: Engine) -> DiskTierError:
    """The error that a loop would see; the engine closes behind it."""
    found: list[BaseException] = []

    def steps() -> None:
        try:
            for step in range(6):
                engine.step(micro_batches(2, seed=step), lr=1e-2)
            engine.settle()
            state(engine)
        except BaseException as error:
            found.append(error)
        engine.close()

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a hang"
    assert len(found) == 1 and isinstance(found[0], DiskTierError)
    return found[0]


@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_error_in_the_middle_is_one_error_and_no_hang(tmp_path: Path, kind: str, at: int) -> None:
    scratch = BreakingFile(tmp_path, at, errno.EIO, kinds=(kind,))
    engine = make_engine(small_model(dtype=torch.bfloat16), replace(BASE, on_disk=EVERY), backend=CpuBackend(), scratch=scratch)
    assert f"the disk at {tmp_path}: Input/output error" in str(until_it_fails(engine))


def test_a_flipped_bit_ends_the_run(tmp_path: Path) -> None:
    scratch = ScratchFile(tmp_path)
    engine = make_engine(small_model(dtype=torch.bfloat16), replace(BASE, on_disk=EVERY), backend=CpuBackend(), scratch=scratch)
    engine.step(micro_batches(2), lr=1e-2)
    engine.settle()
    assert engine.store.disk is not None
    engine.store.disk.settle()
    flip(scratch, engine.store.disk.num_bytes - 5000)  # of the last unit, which was not read ahead
    error = until_it_fails(engine)
    assert (
        f"the disk at {tmp_path} gave back other bytes than were written: optimizer state of {engine.store.units[-1].name}"
        in str(error)
    )
