"""Order, resuming, collation and prefetching (FAULTS rows 15 and 23)."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerferry.config import Config, ModelConfig, TrainConfig
from layerferry.data import Cursor, Prefetch, Sampler, SampleSet, collate, eval_batches, step_batches
from layerferry.data.samples import Row
from layerferry.errors import CheckpointError, DataError

SAMPLERS = st.builds(
    Sampler,
    num_samples=st.integers(8, 40),
    device_rows=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    ranks=st.integers(1, 2),
)


def data(num_samples: int, *, packed: bool = False) -> SampleSet:
    rows = (
        Row(
            input_ids=[n + 1] * (n % 11 + 2),
            labels=[-100] + [n + 1] * (n % 11 + 1),
            position_ids=[0, *range(n % 11 + 1)] if packed else None,
        )
        for n in range(num_samples)
    )
    return SampleSet(rows, isolated=packed)


def first_steps(sampler: Sampler, cursor: Cursor, count: int) -> list[tuple[list[int], Cursor]]:
    return [step for step, _ in zip(sampler.steps(cursor), range(count), strict=False)]


def of_rank(sampler: Sampler, rank: int) -> Sampler:
    fields = ("num_samples", "device_rows", "accumulation", "seed", "shuffle", "drop_last", "ranks")
    return Sampler(**{name: getattr(sampler, name) for name in fields}, rank=rank)


@given(SAMPLERS)
def test_an_epoch_uses_every_sample_once_over_all_ranks(sampler: Sampler) -> None:
    for epoch in (0, 1):
        used: Counter[int] = Counter()
        for rank in range(sampler.ranks):
            steps = first_steps(of_rank(sampler, rank), Cursor(epoch, 0), sampler.steps_per_epoch)
            used.update(i for ids, _ in steps for i in ids)
            assert steps[-1][1] == Cursor(epoch + 1, 0)
        assert set(used.values()) == {1}
        assert len(used) == sampler.usable
        if not sampler.drop_last:
            assert used == Counter(range(sampler.num_samples))


@given(SAMPLERS)
def test_resuming_at_every_step_gives_the_same_steps(sampler: Sampler) -> None:
    count = 2 * sampler.steps_per_epoch
    straight = first_steps(sampler, Cursor(), count)
    cursor = Cursor()
    for number in range(count):
        saved = Cursor.from_json(json.loads(json.dumps(cursor.to_json())))
        assert first_steps(sampler, saved, count - number) == straight[number:]
        ids, cursor = sampler.step(saved)
        assert (ids, cursor) == straight[number]


@given(SAMPLERS)
def test_steps_have_their_rows(sampler: Sampler) -> None:
    steps = first_steps(sampler, Cursor(), sampler.steps_per_epoch)
    assert all(len(ids) == sampler.device_rows * sampler.accumulation for ids, _ in steps[:-1])
    micro = sampler.device_rows * sampler.ranks
    num_micro = sampler.num_samples // micro if sampler.drop_last else -(-sampler.num_samples // micro)
    assert sampler.steps_per_epoch == -(-num_micro // sampler.accumulation)


def test_orders() -> None:
    def order(**changes: object) -> list[int]:
        given = {"num_samples": 50, "device_rows": 1, "accumulation": 1, "seed": 42, **changes}
        return Sampler(**given).order(0).tolist()  # type: ignore[arg-type]

    assert order() == order() != order(seed=43)
    assert order() != Sampler(num_samples=50, device_rows=1, accumulation=1, seed=42).order(1).tolist()
    assert order(shuffle=False) == list(range(50))


def test_settings_of_a_config() -> None:
    train = TrainConfig(per_device_train_batch_size=2, gradient_accumulation_steps=3, seed=1, data_seed=5, disable_shuffling=True)
    found = Sampler.of(Config(model=ModelConfig(model_name_or_path="m"), train=train), 20)
    assert (found.step_rows, found.seed, found.shuffle, found.steps_per_epoch) == (6, 5, False, 4)
    assert (found.total_steps(2.5), found.total_steps(3, 7)) == (10, 7)
    assert found.epochs_done(Cursor(1, 5)) == 1.25


def test_cursors_that_do_not_fit() -> None:
    sampler = Sampler(num_samples=5, device_rows=1, accumulation=1, seed=0)
    with pytest.raises(CheckpointError, match="row 5 of an epoch of 5: the data set has changed"):
        sampler.step(Cursor(0, 5))
    with pytest.raises(CheckpointError, match="has changed"):
        next(sampler.steps(Cursor(0, 9)))
    for value in ({}, {"epoch": 1}, {"epoch": -1, "position": 0}, {"epoch": 1.5, "position": 0}, [1, 2]):
        with pytest.raises(CheckpointError, match="data cursor"):
            Cursor.from_json(value)


def test_nothing_to_train_on() -> None:
    with pytest.raises(DataError, match="no sample"):
        Sampler(num_samples=0, device_rows=1, accumulation=1, seed=0)
    with pytest.raises(DataError, match="dataloader_drop_last drops all of 3 samples: a micro-batch has 4 rows"):
        Sampler(num_samples=3, device_rows=4, accumulation=1, seed=0, drop_last=True)


@given(st.integers(1, 20), st.integers(1, 7), st.booleans())
def test_collation_keeps_every_token(num_samples: int, rows: int, packed: bool) -> None:
    samples = data(num_samples, packed=packed)
    batches = collate(list(samples), rows, pad_id=999)
    assert [len(batch.lengths) for batch in batches] == [rows] * (num_samples // rows) + [num_samples % rows] * (
        num_samples % rows > 0
    )
    flat = [(batch, row) for batch in batches for row in range(len(batch.lengths))]
    for sample, (batch, row) in zip(samples, flat, strict=True):
        length = int(batch.lengths[row])
        width = batch.input_ids.shape[1]
        assert width % 8 == 0 and width - int(batch.lengths.max()) < 8
        assert batch.input_ids[row, :length].tolist() == sample.input_ids.tolist()
        assert batch.labels[row, :length].tolist() == sample.labels.tolist()
        assert set(batch.input_ids[row, length:].tolist()) <= {999}
        assert set(batch.labels[row, length:].tolist()) <= {-100}
        assert batch.isolated == packed
        if packed:
            assert batch.position_ids is not None and sample.position_ids is not None
            assert batch.position_ids[row].tolist() == [*sample.position_ids.tolist(), *range(width - length)]
        else:
            assert batch.position_ids is None


def test_regrouping_changes_no_target() -> None:
    samples = list(data(12))
    assert len({sum(batch.num_targets for batch in collate(samples, rows)) for rows in (1, 2, 5, 12)}) == 1
    assert sum(batch.num_tokens for batch in collate(samples, 5)) == sum(map(len, samples))
    with pytest.raises(DataError, match="0 rows"):
        collate(samples, 0)
    assert collate([], 4) == []


def test_step_batches_carry_ids_and_cursor() -> None:
    samples = data(10)
    sampler = Sampler(num_samples=10, device_rows=2, accumulation=2, seed=3)
    steps = [step for step, _ in zip(step_batches(samples, sampler, Cursor(), 2, 0), range(5), strict=False)]
    assert [step.sample_ids for step in steps] == [ids for ids, _ in first_steps(sampler, Cursor(), 5)]
    assert [step.epoch for step in steps] == [0.4, 0.8, 1.0, 1.4, 1.8]
    firsts = [int(n) for step in steps for batch in step.micro_batches for n in batch.input_ids[:, 0]]
    assert firsts == [i + 1 for step in steps for i in step.sample_ids]
    assert [int(n) for batch in eval_batches(samples, 3, 0) for n in batch.input_ids[:, 0]] == list(range(1, 11))


def test_prefetching_gives_the_same_items() -> None:
    with Prefetch(iter(range(100)), depth=3) as ahead:
        assert list(ahead) == list(range(100))
        assert list(ahead) == []


def test_prefetching_raises_where_the_item_would_have_come() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise DataError("row 2 is broken")

    with Prefetch(source()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(DataError, match="row 2 is broken"):
            next(ahead)
        assert list(ahead) == []


def test_prefetching_stays_within_its_depth_and_ends_when_left() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for n in range(10**9):
            made.append(n)
            yield n

    with Prefetch(source(), depth=2) as ahead:
        assert next(ahead) == 0
        time.sleep(0.05)
        assert len(made) <= 4
        thread = ahead._thread
    assert not thread.is_alive()
    assert thread not in threading.enumerate()


def test_closing_frees_a_waiting_consumer() -> None:
    release = threading.Event()

    def source() -> Iterator[int]:
        release.wait()
        yield 1

    ahead = Prefetch(source())
    found: list[int] = []
    consumer = threading.Thread(target=lambda: found.extend(ahead))
    consumer.start()
    closer = threading.Thread(target=ahead.close)
    closer.start()
    consumer.join(5)
    assert not consumer.is_alive()
    release.set()
    closer.join(5)
    assert not closer.is_alive()
    assert found == []


def test_a_masked_batch_has_no_target() -> None:
    """FAULTS row 13: what the trainer divides by says so."""
    rows = SampleSet(iter([Row(input_ids=[1, 2, 3], labels=[3, -100, -100])]))
    (batch,) = collate(list(rows), 1)
    assert batch.num_targets == 0
    assert np.asarray(batch.lengths).tolist() == [3]
