"""Ten thousand steps and two hundred saves in one process: memory, threads and descriptors stay flat, and the folder keeps its
limit. The short form takes 120 steps."""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from layerferry.trainer import loop, run, train
from layerferry.trainer.state import RunState
from tests.checkpoint.faults import QuickFiles
from tests.reliability.runs import make_config, prepare, saver_on


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def soak(base: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int, saves: int) -> list[tuple[int, int, int]]:
    """(resident bytes, threads, descriptors) at every tenth of the run."""
    seen: list[tuple[int, int, int]] = []
    real = loop.Loop.state

    def state(self: loop.Loop) -> RunState:
        if self.totals.step % (steps // 10) == 0:
            gc.collect()
            seen.append((resident_bytes(), threading.active_count(), num_descriptors()))
        return real(self)

    monkeypatch.setattr(loop.Loop, "state", state)
    monkeypatch.setattr(run, "Saver", saver_on(QuickFiles()))
    settings: dict[str, Any] = {
        "max_steps": steps,
        "save_steps": steps // saves,
        "save_total_limit": 2,
        "logging_steps": steps // 10,
    }
    settings["logging_steps"] = steps // 10
    train(make_config(base, base / "soaked", gradient_accumulation_steps=1, **settings))
    names = sorted(path.name for path in (base / "soaked").glob("checkpoint-*"))
    assert names == sorted(f"checkpoint-{step}" for step in (steps, steps - steps // saves))
    history = json.loads((base / "soaked" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == list(range(steps // 10, steps + 1, steps // 10))
    return seen


def assert_flat(seen: list[tuple[int, int, int]], most_bytes: int) -> None:
    """From the second tenth on: the first warms up."""
    assert len(seen) == 10
    first, last = seen[1], seen[-1]
    print([f"{resident / 2**20:.1f} MiB, {threads} threads, {files} descriptors" for resident, threads, files in seen])
    assert last[0] - first[0] <= most_bytes
    assert last[1] <= first[1] and last[2] <= first[2]


def test_some_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_flat(soak(prepare(tmp_path), monkeypatch, steps=120, saves=20), 4 << 20)


@pytest.mark.soak
def test_ten_thousand_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB in 8000 steps: a kilobyte a step is the noise of the allocator, a leaked tensor is more."""
    assert_flat(soak(prepare(tmp_path), monkeypatch, steps=10_000, saves=200), 8 << 20)
