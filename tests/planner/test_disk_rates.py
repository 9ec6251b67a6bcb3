"""Rates of a disk: measured where they are needed, remembered for its file system, never invented without a note."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerferry.backends.cpu import CpuBackend
from layerferry.config import EngineConfig
from layerferry.planner import disk_rates as rates
from layerferry.planner.machine import machine_for
from tests.store.files import BreakingFile, SmallDisk

MEASURED = {"disk_read_bytes_per_s": 2.0e9, "disk_write_bytes_per_s": 1.5e9}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYERFERRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Measured:
    """In place of ``measure_disk``: what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Path, int]] = []
        monkeypatch.setattr(rates, "measure_disk", self)

    def __call__(self, folder: Path, unit_bytes: int) -> dict[str, float]:
        self.asked.append((folder, unit_bytes))
        return MEASURED


def test_a_machine_has_them_where_a_disk_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, folder = Measured(monkeypatch), tmp_path / "not" / "there" / "yet"
    without = machine_for(EngineConfig(), CpuBackend(), folder)
    assert without.disk_write_bytes_per_s.source == "guess" and not measured.asked
    found = machine_for(EngineConfig(disk_memory=1 << 40), CpuBackend(), folder)
    assert (found.disk_read_bytes_per_s, found.disk_write_bytes_per_s) == tuple(
        rates.Rate(value, "measured") for value in MEASURED.values()
    )
    assert measured.asked == [(tmp_path, rates.UNIT_BYTES)], "where a folder is not there yet, the one above it"
    assert not (tmp_path / "not").exists()
    again = machine_for(EngineConfig(disk_memory=1 << 40), CpuBackend(), tmp_path)
    assert again.disk_read_bytes_per_s == found.disk_read_bytes_per_s and len(measured.asked) == 1


def test_no_more_of_a_disk_is_offered_than_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch)
    monkeypatch.setattr("layerferry.planner.machine.ScratchFile", lambda folder: SmallDisk(folder, 10 << 20))
    for wanted, offered in ((1 << 20, (1 << 20, "disk_memory")), (1 << 40, (10 << 20, "free on the disk"))):
        found = machine_for(EngineConfig(disk_memory=wanted), CpuBackend(), tmp_path)
        assert (found.disk_available, found.disk_source) == offered


def test_no_more_is_written_than_the_disk_may_hold_and_a_small_probe_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch)
    for _ in range(2):
        rates.disk_rates(tmp_path, 6 << 20)
    rates.disk_rates(tmp_path, 1)
    assert [unit_bytes for _, unit_bytes in measured.asked] == [1 << 20, 1 << 20, 4096]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "[" * 100_000, '{"disk_read_bytes_per_s": 1.0, "disk_write_bytes_per_s": 0}']
)
def test_a_damaged_memory_is_none(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, path = Measured(monkeypatch), rates.rates_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    rates.disk_rates(tmp_path, 1 << 40)
    assert len(measured.asked) == 1 and json.loads(path.read_text()) == MEASURED


def test_a_real_disk_has_rates_and_is_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    found, notes = rates.measured_rates(folder, 6 << 16)
    assert not notes and all(rate.source == "measured" and rate.value > 0 for rate in found.values())
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("disk", "reason"), [(lambda f: SmallDisk(f, 4096), "short"), (lambda f: BreakingFile(f, 3, 5), "Input")]
)
def test_a_disk_that_cannot_be_measured_keeps_its_guess_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: object, reason: str
) -> None:
    monkeypatch.setattr(rates, "ScratchFile", disk)
    machine = machine_for(EngineConfig(disk_memory=1 << 20), CpuBackend(), tmp_path)
    assert machine.disk_read_bytes_per_s == machine.disk_write_bytes_per_s == rates.DISK_GUESS
    (note,) = machine.notes
    assert note.startswith(f"the disk of {tmp_path} not measured (") and reason in note and "default stands" in note
