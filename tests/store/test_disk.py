"""The disk tier alone: bytes come back, in every order of readers and writers, and every failure reaches somebody."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from layerferry.backends.chaos import ChaosBackend
from layerferry.backends.cpu import CpuBackend
from layerferry.errors import ConfigError, DiskTierError, PlanError
from layerferry.store import disk
from layerferry.store.disk import RING, DiskTier, file_bytes, ring_bytes
from layerferry.store.scratch import ALIGN_BYTES, ScratchFile
from tests.store.files import BreakingFile, GatedFile, SmallDisk, flip

SIZES = {3: 5000, 4: 12_288, 7: 1, 8: 20_000, 9: 20_000}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several a unit."""
    monkeypatch.setattr(disk, "PIECE_BYTES", 2 * ALIGN_BYTES)


def tier_of(folder: Path, file: ScratchFile | None = None, *, seed: int | None = None) -> DiskTier:
    backend = CpuBackend() if seed is None else ChaosBackend(seed)
    return DiskTier({unit: f"layer.{unit}" for unit in SIZES}, SIZES, backend, file or ScratchFile(folder))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    made = tier_of(tmp_path, seed=1)
    yield made
    made.close()


def write(tier: DiskTier, unit: int, value: int) -> None:
    with tier.at_hand(unit, writes=True) as memory:
        memory[: SIZES[unit]].fill_(value)


def read(tier: DiskTier, unit: int) -> set[int]:
    with tier.at_hand(unit, writes=False) as memory:
        return set(memory[: SIZES[unit]].unique().tolist())


def test_bytes_on_the_disk_and_in_the_ring(tier: DiskTier) -> None:
    blocks = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in SIZES.values()]
    assert tier.num_bytes == sum(blocks) == sum(map(file_bytes, SIZES.values()))
    assert tier.ring_bytes == RING * max(blocks) == ring_bytes(blocks)


def test_what_was_never_written_is_zero_and_costs_nothing(tier: DiskTier) -> None:
    for unit in SIZES:
        assert read(tier, unit) == {0}
        with tier.at_hand(unit, writes=True):
            pass
    tier.settle()
    assert tier.bytes_read == tier.bytes_written == 0 and tier.busy_s == 0.0


def test_every_unit_keeps_its_own_bytes(tier: DiskTier) -> None:
    for unit in SIZES:
        write(tier, unit, unit)
    assert [read(tier, unit) for unit in SIZES] == [{unit} for unit in SIZES]
    tier.settle()
    assert tier.bytes_read == tier.bytes_written == tier.num_bytes and tier.busy_s > 0.0


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_readers_and_writers_against_a_dictionary(tmp_path: Path, seed: int) -> None:
    """Hints that are wrong as often as they are right, a second thread that reads; ``chaos`` holds every buffer to its fences."""
    chance, truth = random.Random(seed), dict.fromkeys(SIZES, 0)
    tier = tier_of(tmp_path, seed=seed)
    stop, fault = threading.Event(), list[BaseException]()

    def look() -> None:
        own = random.Random(seed + 100)
        try:
            while not stop.is_set():
                assert len(read(tier, own.choice(list(SIZES)))) == 1, "torn"
        except BaseException as error:
            fault.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for value in range(1, 60):
            if chance.random() < 0.2:
                tier.expect(chance.sample(list(SIZES), chance.randint(0, len(SIZES))))
            unit = chance.choice(list(SIZES))
            if chance.random() < 0.6:
                write(tier, unit, value)
                truth[unit] = value
            else:
                assert read(tier, unit) == {truth[unit]}
    finally:
        stop.set()
        reader.join()
    assert not fault, fault
    assert {unit: read(tier, unit) for unit in SIZES} == {unit: {value} for unit, value in truth.items()}
    tier.close()


def test_units_are_read_ahead_in_the_order_of_the_step_and_of_the_next(tier: DiskTier) -> None:
    for unit in SIZES:
        write(tier, unit, unit)
    order = list(SIZES)
    sizes = [file_bytes(SIZES[unit]) for unit in order]
    tier.settle()
    tier.expect([*order, 1000])  # a unit that does not live here is passed over
    tier.settle()
    assert tier.bytes_read == sum(sizes[:RING]), "as many as there are buffers, nobody has asked yet"
    for unit in order:
        with tier.at_hand(unit, writes=True):
            pass
    tier.settle()
    assert tier.bytes_read == sum(sizes) + sum(sizes[:RING]), "each once, and the first of the next step"


def test_a_reader_out_of_order_gets_a_buffer_and_what_it_took_is_read_again(tier: DiskTier) -> None:
    for unit in SIZES:
        write(tier, unit, unit)
    tier.settle()
    tier.expect(SIZES)
    tier.settle()
    assert read(tier, 9) == {9} and read(tier, 3) == {3}
    assert [read(tier, unit) for unit in SIZES] == [{unit} for unit in SIZES]


def waits_for_a_buffer(tier: DiskTier) -> bool:
    with tier._changed:  # who does not have to wait has never let go of it
        return tier._num_waiting > 0


def test_a_unit_is_written_behind_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three writers, one a buffer, have gone on while the disk has taken nothing; the next one must wait."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))  # of four threads the disk holds two
    with GatedFile(tmp_path, kinds=("write",)) as file, closing(tier_of(tmp_path, file)) as tier:
        for unit in (3, 7, 8):
            write(tier, unit, unit)
        assert tier.is_busy and tier.bytes_written == 0
        done = threading.Event()
        fourth = threading.Thread(target=lambda: (write(tier, 9, 9), done.set()))
        fourth.start()
        while not (waits_for_a_buffer(tier) or done.is_set()):
            time.sleep(0.001)
        assert not done.is_set()
        file.gate.set()
        fourth.join(20)
        assert done.is_set() and [read(tier, unit) for unit in (3, 7, 8, 9)] == [{3}, {7}, {8}, {9}]


def test_other_bytes_than_were_written_are_found_and_named(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    tier = tier_of(tmp_path, file)
    for unit in SIZES:
        write(tier, unit, unit)
    tier.settle()
    flip(file, file_bytes(SIZES[3]) + file_bytes(SIZES[4]) + file_bytes(SIZES[7]) + 3 * ALIGN_BYTES)
    assert read(tier, 4) == {4}
    with pytest.raises(DiskTierError, match=rf"{tmp_path} gave back other bytes than .* layer\.8, within .* from byte 8192"):
        read(tier, 8)
    with pytest.raises(DiskTierError, match="gave back other bytes"):
        write(tier, 3, 1)
    tier.close()


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_failing_transfer_reaches_whoever_comes_next_and_nobody_hangs(tmp_path: Path, kind: str, at: int) -> None:
    tier = tier_of(tmp_path, BreakingFile(tmp_path, at, errno.EIO, kinds=(kind,)))
    with pytest.raises(DiskTierError, match=rf"the disk at {tmp_path}: Input/output error \(optimizer state of layer"):
        for value in (1, 2):
            for unit in SIZES:
                write(tier, unit, value)
        tier.settle()
    with pytest.raises(DiskTierError):
        tier.settle()
    tier.close()


def test_a_disk_that_does_not_answer_is_named_by_whoever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate opens when the line is written, in the thread that waits: without it, a hang."""
    monkeypatch.setattr(disk, "STANDSTILL_S", 0.05)
    said = []

    class Opens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            file.gate.set()

    handler, logger = Opens(), logging.getLogger("layerferry.store.disk")
    logger.addHandler(handler)
    try:
        with GatedFile(tmp_path, kinds=("write",)) as file, closing(tier_of(tmp_path, file)) as tier:
            write(tier, 3, 7)
            assert read(tier, 3) == {7}
    finally:
        logger.removeHandler(handler)
    assert said and said[0] == f"the disk at {tmp_path} has not moved a byte for 0 s, and is waited for"


def test_a_writer_that_fails_leaves_the_old_bytes(tier: DiskTier) -> None:
    write(tier, 3, 5)
    with pytest.raises(ZeroDivisionError), tier.at_hand(3, writes=True) as memory:
        memory.fill_(6)
        _ = 1 // 0
    assert read(tier, 3) == {5}


def test_a_disk_that_is_too_small_is_named_with_its_numbers(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as found:
        tier_of(tmp_path, SmallDisk(tmp_path, 20_000))
    text = str(found.value)
    assert "the optimizer state of 5 units needs 64.0 KiB @disk, 19.5 KiB are free: 44.5 KiB short" in text
    assert f"disk_folder: {tmp_path}" in text and "disk_memory" in text


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk_folder: .*/file/x cannot be used: Not a directory"):
        tier_of(tmp_path, ScratchFile(tmp_path / "file" / "x"))


def test_memory_of_the_ring_is_where_direct_transfers_need_it(tier: DiskTier) -> None:
    with tier.at_hand(8, writes=False) as memory:
        assert memory.data_ptr() % ALIGN_BYTES == 0 and memory.dtype == torch.uint8
