"""Saving in the background: what waits for what, how long, and how much memory it takes."""

from __future__ import annotations

import ctypes
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.backends.cpu import CpuBackend
from layerferry.checkpoint import checksum
from layerferry.checkpoint.save import Saver
from layerferry.checkpoint.writer import BLOCK_BYTES, THREADS
from layerferry.engine.engine import Engine
from layerferry.engine.sizes import device_sizes
from tests.checkpoint.faults import QuickFiles
from tests.checkpoint.tiny import PLANS, RUN, assert_same, engine_of, finished, load, model_of, save, state_of, train


class Gated(QuickFiles):
    """A disk that takes the bytes of a file only once it is told to: ``open(n)`` lets n more files begin."""

    def __init__(self) -> None:
        self._may = threading.Semaphore(0)
        self.created: list[str] = []

    def create_large(self, path: Path) -> int:
        self.created.append(path.name)
        assert self._may.acquire(timeout=30)
        return super().create_large(path)

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


class Standing(QuickFiles):
    """A disk that takes no byte of a large file until it is told to."""

    def __init__(self) -> None:
        self.moves = threading.Event()

    def write_at(self, descriptor: int, piece: memoryview, position: int) -> int:
        assert self.moves.wait(timeout=30)
        return super().write_at(descriptor, piece, position)


@pytest.mark.parametrize(("plan", "units"), [("streamed", 4), ("streamed", 2), ("streamed", 0), ("home", 4), ("all at home", 4)])
def test_spare_memory_lets_units_go_before_the_disk_has_them(tmp_path: Path, plan: str, units: int) -> None:
    """With room for so many units their updates come although not a byte has been written, and the checkpoint is still that of
    the step before; the others wait for the disk."""
    model = model_of()
    engine = engine_of(model, PLANS[plan])
    train(engine, range(2))
    files = Standing()
    sizes = [sum(plane.buffer.numel() + 256 for plane in engine.store.planes(unit).values()) for unit in engine.update_order]
    saver = Saver(engine, tmp_path, run=RUN, files=files, spare_bytes=lambda: sum(sizes[:units]))
    saver.start(2, {})
    num_waiting = sum(unit.index not in engine.store.on_device for unit in engine.update_order[units:])
    found = train(engine, range(2, 3))
    deadline = time.monotonic() + 20
    while engine.deferred.num_pending > num_waiting and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.deferred.num_pending == num_waiting and saver.is_busy and saver.bytes_written == 0
    files.moves.set()
    plain = finished(saver, model, 2)
    assert train(plain, range(2, 3)) == found
    assert_same(state_of(engine), state_of(plain))


class Throttled(QuickFiles):
    """A disk of a given rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._lock = bytes_per_s, threading.Lock()

    def write_at(self, descriptor: int, piece: memoryview, position: int) -> int:
        with self._lock:
            time.sleep(len(piece) / self._bytes_per_s)
        return super().write_at(descriptor, piece, position)


def test_a_slow_disk_costs_what_it_needs_longer_than_the_step(tmp_path: Path) -> None:
    """The first update waits for its unit's bytes / rate less what passed before it was due: one wait, whose begin is seen from
    outside, so that no thread's turn lies between what is compared and a busy machine cannot break it."""
    engine = engine_of(model_of(vocab_size=512))
    train(engine, range(1))
    engine.settle()
    saver = Saver(engine, tmp_path, run=RUN, files=Throttled(400_000))
    first_s = sum(file.num_bytes for file in saver._contents.pieces[0].files) / 400_000
    begin = time.monotonic()
    saver.start(1, {})
    due_from = time.monotonic()
    train(engine, range(1, 2))
    while engine.deferred.held_s == 0 and saver.is_busy:  # until the first update waits
        time.sleep(0.001)
    waits_since = time.monotonic()
    engine.settle()
    end = time.monotonic()
    saved = saver.take_outcome(wait=True)
    saver.close()
    assert saved is not None and saved.fault is None and saved.seconds >= saver.num_bytes / 400_000
    assert first_s > 0.4 and first_s - (waits_since - begin) <= saved.held_s <= engine.deferred.held_s <= end - due_from


def test_a_disk_that_is_faster_than_the_step_costs_nothing(tmp_path: Path) -> None:
    """At most 5 % of the steps' time, here a second each beside saves of some hundredths."""
    engine = engine_of(model_of())
    train(engine, range(1))
    saver = Saver(engine, tmp_path, run=RUN, files=QuickFiles())
    begin = time.monotonic()
    for step in range(1, 3):
        saver.start(step, {})
        time.sleep(1.0)  # forward and backward
        train(engine, range(step, step + 1))
        saved = saver.take_outcome(wait=True)
        assert saved is not None and saved.fault is None
    saver.close()
    engine.settle()
    assert engine.deferred.held_s <= 0.05 * (time.monotonic() - begin)


@pytest.mark.parametrize("spare_bytes", [0, 1 << 30])
@pytest.mark.parametrize("plan", PLANS)
def test_steps_and_saves_in_turn(tmp_path: Path, plan: str, spare_bytes: int) -> None:
    """A save after every step, each overlapping the next: every checkpoint is its own step."""
    model = model_of()
    engine = engine_of(model, PLANS[plan])
    saver = Saver(engine, tmp_path, run=RUN, files=QuickFiles(), spare_bytes=lambda: spare_bytes)
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
    """Counts the bytes of host buffers."""

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


NOISE_BYTES = 12 << 20
"""Threads, and pages that the allocator keeps."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


M_MMAP_THRESHOLD = -3


class Growth:
    """The largest growth of the resident set inside. Blocks above 256 KiB go back to the system when they are freed: what the
    allocator would keep (32 MiB a thread) is little beside a real unit, and much beside one of these."""

    most = 0

    def _watch(self) -> None:
        while not self._stop.wait(0.0005):
            self.most = max(self.most, resident_bytes() - self._before)

    def __enter__(self) -> Growth:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
        self._before, self._stop = resident_bytes(), threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._watcher.join()


LARGE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 8192}


@pytest.mark.parametrize("plan", ["streamed", "all at home"])
def test_memory_of_resuming(tmp_path: Path, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking up a checkpoint, from its first byte to the engine that can go on, needs what that engine holds and less than one
    unit more: a tensor at a time, and the blocks that are summed (4 MiB a thread, smaller here)."""
    monkeypatch.setattr(checksum, "READ_BYTES", 1 << 18)
    model = model_of(**LARGE)
    engine = engine_of(model, PLANS[plan])
    train(engine, range(1))
    folder = save(engine, tmp_path, 1, files=QuickFiles()).folder
    planes, unit = engine.store.num_bytes, unit_bytes(engine)
    sizes = device_sizes(engine.store.units, PLANS[plan], engine.store.specs)
    buffers = sum(size.total for size in sizes.values())  # slots, slabs, sums: resident or not, as the allocator finds them
    with Growth() as growth:
        resumed = load(model, folder, PLANS[plan])
    assert unit > 3 * NOISE_BYTES and resumed.store.num_bytes == planes
    assert growth.most < planes + buffers + unit + NOISE_BYTES


@pytest.mark.parametrize("plan", ["streamed", "all at home"])
def test_memory(tmp_path: Path, plan: str) -> None:
    """Saving takes nothing more than the planes and the threads' buffers, and one unit where units live @device: torch's own and
    Python's allocations are both counted.

    The unit is large beside what new threads and the allocator's arenas take in a worker that has run other tests (6 MiB seen).
    """
    engine = engine_of(model_of(**LARGE), PLANS[plan], backend=Counting())
    train(engine, range(1))
    engine.settle()
    asked = engine.backend.asked  # type: ignore[attr-defined]
    tracemalloc.start()
    with Growth() as growth:
        saver = Saver(engine, tmp_path, run=RUN, files=QuickFiles())
        saver.start(1, {})
        saved = saver.take_outcome(wait=True)
        saver.close()
    python_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert saved is not None and saved.fault is None
    asked = engine.backend.asked - asked  # type: ignore[attr-defined]
    assert (asked > 0) == (plan == "all at home")
    assert python_bytes < unit_bytes(engine) / 2
    assert unit_bytes(engine) > 3 * NOISE_BYTES
    assert growth.most < (unit_bytes(engine) if asked else 0) + THREADS * BLOCK_BYTES + NOISE_BYTES
