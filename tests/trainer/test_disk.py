"""The disk tier in a whole run: keys, what is said of it, the same files as a run without; disks that die, fill up or crawl."""

from __future__ import annotations

import errno
import logging
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.backends.cpu import CpuBackend
from layerferry.config import Config
from layerferry.errors import DiskTierError, PlanError
from layerferry.plan import Plan, size_text
from layerferry.planner.rate import Rate
from layerferry.planner.report import plan_for
from layerferry.trainer import train
from layerferry.trainer.disk import SLOWER, STEPS, DiskWatch
from layerferry.trainer.watchdog import Lane, Watchdog
from tests.conformance.harness import make_engine, micro_batches
from tests.engine.small import small_model
from tests.planner.subjects import machine
from tests.reliability.runs import assert_same_folder, make_config, prepare
from tests.store.files import BreakingFile, GatedFile, SmallDisk

RUN: dict[str, Any] = {"max_steps": 3, "save_steps": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def whole(base: Path) -> Path:
    """The run with every plane in memory."""
    output = base / "host" / "run"
    train(make_config(base, output, **RUN))
    return output


def on_disk(base: Path, output: Path, folder: Path | None = None) -> Config:
    config = make_config(base, output, engine="disk", **RUN)
    return replace(config, engine=replace(config.engine, disk_folder=None if folder is None else str(folder)))


def assert_same_run(found: Path, expected: Path) -> None:
    assert_same_folder(found, expected)
    for step in range(1, 4):
        assert_same_folder(found / f"checkpoint-{step}", expected / f"checkpoint-{step}")


def test_the_same_files_as_without_and_what_it_costs_is_said(
    base: Path, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output, folder = tmp_path / "run", tmp_path / "disk"
    config = on_disk(base, output, folder)
    plan = plan_for(config).plan
    assert plan.disk_units == 3 and not folder.exists()
    with caplog.at_level(logging.INFO, "layerferry"):
        train(config)
    assert_same_run(output, whole)
    assert not list(folder.iterdir())
    said = " ".join(caplog.text.split())
    num_bytes = plan.total("@disk")
    assert "units whose residues and moments live @disk" in said
    assert f"{size_text(num_bytes)} are read from the disk and written to it every step" in said and "TB a day" in said
    assert f"disk tier: {size_text(3 * num_bytes)} written to {folder}, " in said, "once a step, and nothing else"


def test_a_disk_that_is_full_at_the_start_is_named_before_the_first_step(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerferry.api.ScratchFile", partial(SmallDisk, room=10_000))
    monkeypatch.setattr("layerferry.engine.engine.Engine.step", lambda *a, **k: pytest.fail("a step was taken"))
    with pytest.raises(PlanError, match=rf"disk_folder: {tmp_path}/run: .* 9\.8 KiB are free: .* short\. Free space, name a"):
        train(on_disk(base, tmp_path / "run"))


@pytest.mark.parametrize(("fault", "reason"), [(errno.ENOSPC, "No space left on device"), (errno.EIO, "Input/output error")])
def test_a_disk_that_fails_in_the_run_ends_it_with_one_line_and_the_same_command_goes_on(
    base: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int, reason: str
) -> None:
    """At the second step's first write: the first checkpoint is whole."""
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("layerferry.api.ScratchFile", partial(BreakingFile, at=3, fault=fault, kinds=("write",)))
        with pytest.raises(DiskTierError) as caught:
            train(on_disk(base, output))
    first = r"starts anew, for no checkpoint can be resumed|goes on from checkpoint-1 \(without .* and resume_from_checkpoint\)"
    line = (
        rf"^the disk at {output}: {reason} \(optimizer state of .*\); the same command ({first}); disk_folder names another disk$"
    )
    assert caught.match(line)
    train(on_disk(base, output))
    assert_same_run(output, whole)


# ---------------------------------------------------------------- a dead disk


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_dead_disk_is_the_first_name_that_the_watchdog_calls(tmp_path: Path, kind: str) -> None:
    """A transfer hangs in the system for ever; the optimizer waits for it, and the step for the optimizer."""
    scratch = GatedFile(tmp_path, kinds=(kind,))
    model = small_model(dtype=torch.bfloat16)  # whose residues are zero: loading writes nothing
    engine = make_engine(model, Plan(on_disk=(0, 1, 2, 3, 4)), backend=CpuBackend(), scratch=scratch)
    assert engine.store.disk is not None
    watch = DiskWatch(engine.store.disk, machine())
    optimizer = Lane("optimizer", lambda: engine.deferred.num_pending > 0, lambda: engine.deferred.num_done, "")
    named: list[Lane] = []

    def on_stall(stalled: list[Lane]) -> None:
        named.extend(stalled)
        scratch.gate.set()

    def steps() -> None:
        for step in range(3):
            engine.step(micro_batches(2, seed=step), lr=1e-2)

    with scratch, Watchdog([watch.lane(), optimizer], 2.0, on_stall):  # far more than a step takes, on a busy machine too
        thread = threading.Thread(target=steps)
        thread.start()
        thread.join(60)
    engine.close()
    assert not thread.is_alive() and named[0].name == "disk tier"
    assert named[0].advice == f"Is the disk of {tmp_path} alive?"


# ---------------------------------------------------------------- a slow disk


class Tier:
    """A disk that has moved ``steps`` times ``step_bytes`` each way, in ``step_s`` seconds each time."""

    folder, is_busy = "/a/disk", False

    def __init__(self, step_s: float, step_bytes: int) -> None:
        self._step_s, self._step_bytes, self.steps = step_s, step_bytes, 0

    bytes_read = bytes_written = property(lambda self: self.steps * self._step_bytes)
    busy_s = property(lambda self: self.steps * self._step_s)


def watched(step_s: float, steps: int, step_bytes: int = 10**9) -> DiskWatch:
    """Planned: 1.5 s a step of 1 GB each way."""
    rates = {"disk_read_bytes_per_s": Rate(1e9, "measured"), "disk_write_bytes_per_s": Rate(2e9, "measured")}
    tier = Tier(step_s, step_bytes)
    watch = DiskWatch(tier, replace(machine(), **rates))
    for _ in range(steps):
        tier.steps += 1
        watch.step_done()
    return watch


def test_a_disk_that_is_slower_than_planned_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = watched(1.5 * SLOWER + 0.1, 3 * STEPS)
    [record] = caplog.records
    said = "the disk at /a/disk moves 0.65 GB/s, the plan counted on 1.33 (measured): updates may wait for it"
    assert record.getMessage().startswith(said) and "layerferry probe --disk" in record.getMessage()
    assert watch.summary() == f"disk tier: {size_text(9e9)} written to /a/disk, {size_text(9e9)} read"


def test_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    watched(1.5 * SLOWER - 0.1, 3 * STEPS)
    watched(100.0, STEPS - 1)
    assert not caplog.records


@pytest.mark.parametrize(("step_bytes", "named"), [(12 << 10, False), ((64 << 20) - 1, False), (64 << 20, True)])
def test_a_rate_of_few_bytes_is_none(step_bytes: int, named: bool, caplog: pytest.LogCaptureFixture) -> None:
    """12 KiB a step are 0.00 GB/s of any disk. A probe writes six units of 64 MiB: a unit in each of three steps, both ways."""
    watched(1.0, 3 * STEPS, step_bytes)
    assert bool(caplog.records) is named


def test_the_file_is_on_the_disk_of_the_run_unless_another_is_named(base: Path, tmp_path: Path) -> None:
    assert on_disk(base, tmp_path / "run").disk_folder == tmp_path / "run"
    assert on_disk(base, tmp_path / "run", tmp_path / "disk").disk_folder == tmp_path / "disk"
