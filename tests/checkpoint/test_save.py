"""Saving in the background: what waits for what, how long, and how much memory it takes."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.backends.cpu import CpuBackend
from layerferry.checkpoint.save import Saver
from layerferry.engine.engine import Engine
from tests.checkpoint.faults import QuickFiles
from tests.checkpoint.tiny import PLANS, RUN, assert_same, engine_of, load, model_of, state_of, train


class Gated(QuickFiles):
    """A disk that takes the bytes of a file only once it is told to: ``open(n)`` lets n more files begin."""

    def __init__(self) -> None:
        self._may = threading.Semaphore(0)
        self.created: list[str] = []

    def create(self, path: Path) -> int:
        self.created.append(path.name)
        assert self._may.acquire(timeout=30)
        return super().create(path)

    def open(self, count: int) -> None:
        self._may.release(count)


def test_only_the_unit_that_is_being_written_waits(tmp_path: Path) -> None:
    """While the first unit is on its way to a disk that stands still, the next forward and backward run to their end; the
    next update of that unit waits, and so do those behind it; when the disk moves, everything does."""
    model = model_of()
    engine = engine_of(model)
    train(engine, range(2))
    files = Gated()
    saver = Saver(engine, tmp_path, run=RUN, files=files)
    saver.start(2, {})
    found = train(engine, range(2, 3))  # a whole step, although not one byte has been written
    time.sleep(0.05)
    assert saver.is_busy and len(files.created) == 1 and engine.deferred.num_pending == 4
    files.open(2)  # both files of the first unit
    deadline = time.monotonic() + 20
    while engine.deferred.num_pending == 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.deferred.num_pending == 3 and saver.is_busy
    files.open(100)
    saved = saver.take_outcome(wait=True)
    engine.settle()
    saver.close()
    assert saved is not None and saved.fault is None and engine.deferred.held_s > 0.04
    plain = engine_of(model)
    assert train(plain, range(3))[2:] == found
    assert_same(state_of(engine), state_of(plain))
    plain = engine_of(model)
    train(plain, range(2))
    assert_same(state_of(load(model, saved.folder)), state_of(plain))


@pytest.mark.parametrize("plan", PLANS)
def test_steps_and_saves_in_turn(tmp_path: Path, plan: str) -> None:
    """A save after every step, each overlapping the next: every checkpoint is its own step."""
    model = model_of()
    engine = engine_of(model, PLANS[plan])
    saver = Saver(engine, tmp_path, run=RUN, files=QuickFiles())
    for step in range(1, 5):
        train(engine, range(step - 1, step))
        saver.take_outcome(wait=True)
        saver.start(step, {"run.json": b"{}"})
    train(engine, range(4, 5))
    saver.close()
    plain = engine_of(model)
    for step in range(1, 5):
        train(plain, range(step - 1, step))
        assert_same(state_of(load(model, tmp_path / f"checkpoint-{step}")), state_of(plain))


def test_a_fault_of_the_optimizer_thread_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model_of())
    train(engine, range(1))

    def broken(*arguments: Any) -> None:
        raise RuntimeError("worker")

    engine.settle()
    monkeypatch.setattr(engine.optimizer, "step", broken)
    train(engine, range(1, 2))
    saver = Saver(engine, tmp_path, run=RUN)
    saver.start(2, {})
    with pytest.raises(RuntimeError, match="worker"):
        saver.take_outcome(wait=True)
    saver.close()
    with pytest.raises(RuntimeError, match="worker"):
        engine.settle()
    assert list(tmp_path.glob("checkpoint-*")) == []


class Counting(CpuBackend):
    """Counts host buffers: saving and restoring must ask for none."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def host_buffer(self, num_bytes: int, *, travels: bool) -> torch.Tensor:
        self.asked += num_bytes
        return super().host_buffer(num_bytes, travels=travels)


def unit_bytes(engine: Engine) -> int:
    """Bytes of the largest unit's planes without the gradient."""
    kinds = [kind for kind in engine.store.specs if kind != "grad"]
    return max(sum(engine.store.plane(unit, kind).buffer.numel() for kind in kinds) for unit in engine.store.units)


NOISE_BYTES = 8 << 20
"""Threads, and pages that the allocator keeps."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("plan", ["streamed", "all at home"])
def test_memory(tmp_path: Path, plan: str) -> None:
    """Saving takes at most one unit more than the planes: torch's own and Python's allocations are both counted.

    The unit is large beside what new threads and the allocator's arenas take in a worker that has run other tests (6 MiB seen).
    """
    model = model_of(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=4096)
    engine = engine_of(model, PLANS[plan], backend=Counting())
    train(engine, range(1))
    engine.settle()
    asked = engine.backend.asked  # type: ignore[attr-defined]
    tracemalloc.start()
    before, most, stop = resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.0005):
            most = max(most, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    saver = Saver(engine, tmp_path, run=RUN, files=QuickFiles())
    saver.start(1, {})
    saved = saver.take_outcome(wait=True)
    saver.close()
    stop.set()
    watcher.join()
    python_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert saved is not None and saved.fault is None
    assert engine.backend.asked == asked  # type: ignore[attr-defined]
    assert python_bytes < unit_bytes(engine) / 2
    assert unit_bytes(engine) > 3 * NOISE_BYTES
    assert most - before < unit_bytes(engine) + NOISE_BYTES
