"""From samples to steps: a deterministic, resumable order, micro-batches, and a thread that collates ahead.

The order is a pure function of (seed, epoch), and the place in it is a cursor of two numbers, so that resuming is only
starting at a cursor: no generator state, nothing to replay. Steps per epoch are counted as Hugging Face's trainer does (the
last step of an epoch may be shorter). Padding is on the right to the longest row of a micro-batch, up to a multiple of 8;
where rows are packed it is a last sample of its own, whose positions restart too, so that it can be isolated like the
others. Checked by ``tests/data/test_batches.py``.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from layerferry.config import Config
from layerferry.data.samples import Sample
from layerferry.engine.batch import IGNORE_INDEX, MicroBatch
from layerferry.errors import CheckpointError, DataError

PAD_MULTIPLE = 8
"""Micro-batches are padded to a multiple of this many tokens: the tensor cores' granule."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Cursor:
    """``position`` rows of ``epoch`` have been used, over all ranks."""

    epoch: int = 0
    position: int = 0

    def to_json(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    @classmethod
    def from_json(cls, value: Any) -> Cursor:
        known = isinstance(value, dict) and set(value) == {"epoch", "position"}
        if not known or not all(type(number) is int and number >= 0 for number in value.values()):
            raise CheckpointError(f"the data cursor {value!r} is not {{epoch, position}}")
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Which rows each optimizer step takes: ``device_rows`` times ``accumulation`` on each rank."""

    num_samples: int
    device_rows: int
    accumulation: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.num_samples == 0:
            raise DataError("there is no sample to train on")
        if self.usable == 0:
            rows = self.device_rows * self.ranks
            raise DataError(f"dataloader_drop_last drops all of {self.num_samples} samples: a micro-batch has {rows} rows")

    @classmethod
    def of(cls, config: Config, num_samples: int, *, ranks: int = 1, rank: int = 0) -> Sampler:
        train = config.train
        return cls(
            num_samples=num_samples,
            device_rows=train.per_device_train_batch_size,
            accumulation=train.gradient_accumulation_steps,
            seed=train.seed if train.data_seed is None else train.data_seed,
            shuffle=not train.disable_shuffling,
            drop_last=train.dataloader_drop_last,
            ranks=ranks,
            rank=rank,
        )

    @property
    def step_rows(self) -> int:
        """Rows of a full step, over all ranks."""
        return self.device_rows * self.accumulation * self.ranks

    @property
    def usable(self) -> int:
        """Samples an epoch uses: all, or, with ``drop_last``, those that fill micro-batches."""
        micro = self.device_rows * self.ranks
        return self.num_samples // micro * micro if self.drop_last else self.num_samples

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.usable // self.step_rows)

    def total_steps(self, num_train_epochs: float, max_steps: int = -1) -> int:
        """``max_steps`` where it is set, else the epochs' steps, rounded up."""
        return max_steps if max_steps > 0 else math.ceil(num_train_epochs * self.steps_per_epoch)

    def order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Sample ids of ``epoch`` in the order of use."""
        if not self.shuffle:
            return np.arange(self.usable, dtype=np.int64)
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)[: self.usable]

    def step(self, cursor: Cursor) -> tuple[list[int], Cursor]:
        """This rank's sample ids of the step at ``cursor`` (none, maybe, in a short last step), and the cursor behind it."""
        if cursor.position >= self.usable:
            raise CheckpointError(
                f"the data cursor stands at row {cursor.position} of an epoch of {self.usable}: the data set has changed"
            )
        return self._step(cursor, self.order(cursor.epoch))

    def steps(self, cursor: Cursor) -> Iterator[tuple[list[int], Cursor]]:
        """Steps from ``cursor`` on, without end."""
        epoch, order = -1, np.empty(0, np.int64)
        while True:
            if cursor.position >= self.usable:
                self.step(cursor)
            if cursor.epoch != epoch:
                epoch, order = cursor.epoch, self.order(cursor.epoch)
            ids, cursor = self._step(cursor, order)
            yield ids, cursor

    def epochs_done(self, cursor: Cursor) -> float:
        return cursor.epoch + cursor.position / self.usable

    def epochs_of(self, steps: int) -> float:
        """Epochs that so many steps are, if none is skipped: what ``epochs_done`` says behind the last of them."""
        whole, rest = divmod(steps, self.steps_per_epoch)
        return self.epochs_done(Cursor(whole, rest * self.step_rows))

    def _step(self, cursor: Cursor, order: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[list[int], Cursor]:
        stop = min(cursor.position + self.step_rows, self.usable)
        ids = order[cursor.position : stop]
        mine = ids[len(ids) * self.rank // self.ranks : len(ids) * (self.rank + 1) // self.ranks]
        after = Cursor(cursor.epoch + 1, 0) if stop == self.usable else Cursor(cursor.epoch, stop)
        return [int(i) for i in mine], after


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One optimizer step's micro-batches, the ids of their samples in order, and the cursor behind them."""

    micro_batches: list[MicroBatch]
    sample_ids: list[int]
    cursor: Cursor
    epoch: float


def step_batches(samples: Sequence[Sample], sampler: Sampler, cursor: Cursor, rows: int, pad_id: int) -> Iterator[StepBatch]:
    """Steps from ``cursor`` on, collated in micro-batches of ``rows``, without end."""
    for ids, after in sampler.steps(cursor):
        micro_batches = collate([samples[i] for i in ids], rows, pad_id)
        yield StepBatch(micro_batches=micro_batches, sample_ids=ids, cursor=after, epoch=sampler.epochs_done(after))


def eval_batches(samples: Sequence[Sample], rows: int, pad_id: int) -> Iterator[MicroBatch]:
    """Every sample once, in order: evaluation."""
    for start in range(0, len(samples), rows):
        yield from collate(samples[start : start + rows], rows, pad_id)


def collate(samples: Sequence[Sample], rows: int, pad_id: int = 0) -> list[MicroBatch]:
    """``samples`` in micro-batches of ``rows``, in order; the last may have fewer."""
    if rows < 1:
        raise DataError(f"a micro-batch of {rows} rows holds nothing")
    return [_micro_batch(samples[start : start + rows], pad_id) for start in range(0, len(samples), rows)]


def _micro_batch(samples: Sequence[Sample], pad_id: int) -> MicroBatch:
    lengths = [len(sample) for sample in samples]
    width = -(-max(lengths) // PAD_MULTIPLE) * PAD_MULTIPLE
    input_ids = np.full((len(samples), width), pad_id, dtype=np.int64)
    labels = np.full((len(samples), width), IGNORE_INDEX, dtype=np.int64)
    positions = None if samples[0].position_ids is None else np.zeros((len(samples), width), dtype=np.int64)
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        input_ids[row, :length] = sample.input_ids
        labels[row, :length] = sample.labels
        if positions is not None and sample.position_ids is not None:
            positions[row, :length] = sample.position_ids
            positions[row, length:] = np.arange(width - length)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        position_ids=None if positions is None else torch.from_numpy(positions),
        isolated=samples[0].isolated,
    )


class Prefetch(Generic[Item]):
    """Runs an iterator ``depth`` items ahead in a thread. Only its owner iterates; leaving the ``with`` block ends the thread.

    An exception of the iterator is raised where its item would have come. The thread can always end: it never waits
    without a time-out, and it says that it has ended even when the iterator fails.
    """

    def __init__(self, source: Iterator[Item], depth: int = 2) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(source,), name="layerferry-data", daemon=True)
        self._thread.start()

    def _run(self, source: Iterator[Item]) -> None:
        try:
            for item in source:
                if not self._put(("item", item)):
                    return
            self._put(("end", None))
        except BaseException as error:  # everything must reach the consumer, or it would wait for ever
            self._put(("error", error))

    def _put(self, message: tuple[str, Any]) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(message, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Prefetch[Item]:
        return self

    def __next__(self) -> Item:
        if self._ended:
            raise StopIteration
        kind, value = self._take()
        if kind == "item":
            item: Item = value
            return item
        self._ended = True
        if kind == "error":
            raise value
        raise StopIteration

    def _take(self) -> tuple[str, Any]:
        while True:
            try:
                return self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._stop.is_set():
                    return "end", None

    def close(self) -> None:
        """End the thread; what it has prepared is dropped."""
        self._stop.set()
        self._ended = True
        self._thread.join()

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
