"""Saving in the background: the run goes on, and a unit's next update waits only until that unit is copied or written.

``start`` takes a hold on every unit between two steps and returns. A thread then goes through the pieces in the order in which
the next updates will come: it waits for the piece's own updates, and gives its files to the writer (``writer``). Where host
memory can be spared it copies the piece first and lets it go at once (``copies``); else the planes themselves are written,
and let go when the disk has them. Units that live @device are always copied, if need be one at a time, and so are those whose
state is @disk, because the ring of the disk tier belongs to the updates. So a
checkpoint is the state after exactly one step, and training waits only for what neither a step's time nor spare memory hides.

Everything goes into a hidden folder; small files and the manifest come last; then the folder gets its name, ``latest``
moves, and only then do old checkpoints go. A failure at any point leaves earlier checkpoints whole and the run alive:
it is kept for ``take_outcome``. Checked by ``tests/checkpoint/test_save.py`` and ``test_faults.py``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerferry.backends.base import Fence, Lane
from layerferry.checkpoint.checksum import sums_of
from layerferry.checkpoint.contents import Contents, Piece, element_names, trained_names
from layerferry.checkpoint.copies import Room
from layerferry.checkpoint.files import Files, reason_of, write_file
from layerferry.checkpoint.folders import LATEST, PARTIAL, REPLACED, Latest, Line, name_of, remove_old, write_latest
from layerferry.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from layerferry.checkpoint.writer import Writing, disk_threads
from layerferry.engine.deferred import Hold
from layerferry.engine.engine import Engine
from layerferry.errors import CheckpointError
from layerferry.layout import GRAD, WEIGHT, Plane, round_up
from layerferry.plan import size_text
from layerferry.store.safetensors_file import INDEX_FILE
from layerferry.units import Unit
from layerferry.version import VERSION

ALIGN_BYTES = 256
"""Planes begin at multiples of this in the copy of a unit."""

logger = logging.getLogger("layerferry.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that was written, or why it was not."""

    folder: Path
    num_bytes: int
    seconds: float
    fault: str | None
    """None: the checkpoint is whole and in its place."""
    released_s: float = 0.0
    """Seconds after which every unit could be updated again."""
    held_s: float = 0.0
    """Seconds that updates have waited for it: the most that it has cost."""
    note: str | None = None
    """What went wrong behind a checkpoint that is whole."""


class Saver:
    """Writes the checkpoints of one run. Called from the training thread; owns the writing thread."""

    def __init__(
        self,
        engine: Engine,
        output_dir: Path,
        *,
        run: str,
        line: Line = (),
        keep: int | None = None,
        model_only: bool = False,
        files: Files | None = None,
        spare_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """``line``: the runs that ``run`` goes on from (``folders``). ``spare_bytes``: host memory that copies may take, asked
        when a checkpoint begins."""
        self._engine, self._output_dir, self._keep = engine, output_dir, keep
        self._run, self._line = run, line
        self._model_only = model_only
        self._files = files or Files()
        self._contents = Contents(engine, model_only=model_only)
        self._spare_bytes = spare_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._disk_threads = disk_threads()
        self._lock = threading.Lock()
        self._pending: Future[Saved] | None = None
        self._unproven: int | None = None
        """Step of the newest checkpoint, as long as no finite step has followed it."""
        self._pruning: Future[None] | None = None
        self.bytes_written = 0
        """Bytes of all checkpoints so far: whether the writer moves."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one checkpoint, the small files not counted."""
        return self._contents.num_bytes

    @property
    def model_bytes(self) -> int:
        """Bytes of the weights as transformers loads them."""
        return self._contents.model_bytes

    @property
    def is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def check_space(self, *, more_bytes: int = 0) -> None:
        """``CheckpointError`` where the disk has no room for one checkpoint and ``more_bytes``."""
        needed = self.num_bytes + more_bytes
        free = self._files.free_bytes(self._output_dir)
        if free < needed:
            less = "" if self._model_only else ", or set save_only_model: true"
            raise CheckpointError(
                f"{self._output_dir}: a checkpoint needs {size_text(needed)}, {size_text(free)} are free: "
                f"{size_text(needed - free)} short. Free space, use another output_dir{less}"
            )

    def check_model_space(self) -> None:
        """``CheckpointError`` where the disk has no room for the model at the end."""
        free = self._files.free_bytes(self._output_dir)
        if free < self.model_bytes:
            raise CheckpointError(
                f"{self._output_dir}: the trained model needs {size_text(self.model_bytes)}, {size_text(free)} are "
                f"free: {size_text(self.model_bytes - free)} short. Free space, or use another output_dir"
            )

    def start(self, step: int, small_files: Mapping[str, bytes]) -> None:
        """Begin ``checkpoint-<step>``; waits for the one before. ``small_files`` are written as they are."""
        assert self._pending is None, "the outcome of the checkpoint before must be taken first"
        self._end_pruning()  # its room is counted on
        folder = self._output_dir / name_of(step)
        try:
            self._files.check()
            self.check_space(more_bytes=sum(map(len, small_files.values())))
        except (CheckpointError, OSError) as error:
            self._pending = Future()
            self._pending.set_result(_failed(folder, time.monotonic(), error))
            return
        held_before_s = self._engine.deferred.held_s
        holds = {unit.index: self._engine.deferred.hold(unit) for unit in self._engine.update_order}
        travels = bool(self._engine.store.on_device)
        largest_bytes = max(map(self._copy_bytes, self._contents.pieces))
        room = Room(self._engine.backend, self._spare_bytes(), largest_bytes=largest_bytes, travels=travels)
        self._pending = self._thread.submit(self._save, folder, step, dict(small_files), holds, room, held_before_s)
        self._unproven = step

    def prove(self, step: int) -> None:
        """Step ``step`` was finite: what was saved before it is well, and what was kept in case it is not goes behind it."""
        if self._keep is not None and self._unproven is not None and step > self._unproven:
            self._unproven = None
            self._pruning = self._thread.submit(self._prune)  # in its turn: behind the save

    def take_outcome(self, *, wait: bool) -> Saved | None:
        """How the checkpoint that was begun last has ended; None where there is none, or it has not ended and ``wait`` is off.

        An exception that is no fault of the disk (of the optimizer's thread, or ours) is raised.
        """
        if wait:
            self._end_pruning()
        if self._pending is None or not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def _end_pruning(self) -> None:
        pruning, self._pruning = self._pruning, None
        if pruning is not None:
            pruning.result()

    def close(self) -> None:
        """Finish what is being written, and end the threads."""
        self._thread.shutdown(wait=True)
        self._disk_threads.shutdown(wait=True)

    # ---------------------------------------------------------------- in the thread of the checkpoint

    def _save(
        self,
        folder: Path,
        step: int,
        small_files: dict[str, bytes],
        holds: dict[int, Hold],
        room: Room,
        held_before_s: float,
    ) -> Saved:
        begin = time.monotonic()
        releases: list[float] = []
        for hold in holds.values():
            hold.released.add_done_callback(lambda _: releases.append(time.monotonic() - begin))
        partial = self._output_dir / f"{PARTIAL}{folder.name}"
        try:
            try:
                num_bytes = self._fill(partial, step, small_files, holds, room)
                self._put_in_place(partial, folder)
            finally:
                for hold in holds.values():  # of pieces that were never begun
                    _let_go(hold, self._engine.backend.record(Lane.HOST))
        except (OSError, CheckpointError) as error:
            with suppress(OSError):
                self._files.remove(partial)
            return _failed(folder, begin, error)
        note = self._tidy(folder, step)
        return Saved(
            folder=folder,
            num_bytes=num_bytes,
            seconds=time.monotonic() - begin,
            fault=None,
            released_s=max(releases),
            held_s=self._engine.deferred.held_s - held_before_s,
            note=note,
        )

    def _tidy(self, folder: Path, step: int) -> str | None:
        """What follows a checkpoint that is whole: ``latest`` moves, old ones go. A fault here costs nothing but room."""
        try:
            latest = Latest(run=self._run, line=self._line, checkpoint=folder.name)
            write_latest(self._files, self._output_dir, latest)
            self._remove_old(latest, unproven=step)
        except OSError as error:
            return f"{LATEST} could not be moved, or earlier checkpoints not be removed: {reason_of(error)}"
        return None

    def _prune(self) -> None:
        """What only an unproven checkpoint has kept goes."""
        try:
            self._remove_old(Latest(run=self._run, line=self._line, checkpoint=None), unproven=None)
        except OSError as error:
            logger.warning("%s: earlier checkpoints could not be removed: %s", self._output_dir, reason_of(error))

    def _remove_old(self, latest: Latest, *, unproven: int | None) -> None:
        for path in remove_old(self._files, self._output_dir, latest, keep=self._keep, unproven=unproven):
            logger.info("removed %s: save_total_limit", path)

    def _fill(self, partial: Path, step: int, small_files: dict[str, bytes], holds: dict[int, Hold], room: Room) -> int:
        self._files.remove(partial)
        self._files.make_folder(partial)
        with Writing(self._files, self._disk_threads, self._count) as writing:
            for piece in self._contents.pieces:
                self._begin_piece(partial, piece, {unit.index: holds.pop(unit.index) for unit in piece.units}, writing, room)
            records = writing.records()
        for name, content in {**small_files, INDEX_FILE: self._contents.index}.items():
            write_file(self._files, partial / name, content)
            records[name] = FileRecord(num_bytes=len(content), sums=sums_of(content))
        manifest = Manifest(
            run=self._run,
            line=self._line,
            step=step,
            resumable=not self._model_only,
            state_planes=element_names(self._engine),
            trained=trained_names(self._engine),
            files=records,
            versions={"layerferry": VERSION, "torch": str(torch.__version__)},
        )
        write_file(self._files, partial / MANIFEST, manifest.to_bytes())
        self._files.sync_folder(partial)
        return sum(record.num_bytes for record in records.values())

    def _begin_piece(self, partial: Path, piece: Piece, holds: dict[int, Hold], writing: Writing, room: Room) -> None:
        """Begin to write one piece; when the disk has it, its units may be updated and its copy is given back."""
        backend, taken = self._engine.backend, ExitStack()
        try:
            for hold in holds.values():
                taken.callback(_let_go, hold, backend.record(Lane.HOST))
            taken.callback(piece.forget)
            buffer = self._buffer_for(piece, room)
            if buffer is not None:
                taken.callback(room.give, buffer)
            for unit in piece.units:
                hold = holds[unit.index]
                fence = hold.settled.result()
                if buffer is not None:
                    planes, buffer = self._copied(unit, fence, buffer)
                    _let_go(hold, backend.record(Lane.HOST))
                else:
                    planes = self._saved_planes(self._engine.store.planes(unit))
                    backend.wait(Lane.HOST, fence)
                    backend.touch(Lane.HOST, reads=[plane.buffer for plane in planes.values()])
                    taken.callback(_let_go, hold, backend.record(Lane.HOST))  # runs before the one above
                taken.enter_context(self._contents.seen(unit, planes))
            writing.put(partial, piece.files, taken.close)
        except BaseException:
            taken.close()
            raise

    def _buffer_for(self, piece: Piece, room: Room) -> Tensor | None:
        """Memory for a copy of the piece; None: it is written from where it lies."""
        needed = self._copy_bytes(piece)
        store = self._engine.store
        away = store.on_device if self._model_only else store.on_device | store.on_disk
        must = any(unit.index in away for unit in piece.units)
        return room.take(needed) if must or room.has(needed) else None

    def _copy_bytes(self, piece: Piece) -> int:
        store = self._engine.store
        planes = [plane for unit in piece.units for plane in self._saved_planes(store.planes(unit)).values()]
        return sum(_aligned(plane.buffer.numel()) for plane in planes)

    def _copied(self, unit: Unit, fence: Fence, buffer: Tensor) -> tuple[dict[str, Plane], Tensor]:
        """Copies of the planes of ``unit`` at the front of ``buffer``, and what is left of it."""
        if self._model_only:
            return self._copies(unit, self._engine.store.planes(unit), fence, buffer)
        with self._engine.store.at_hand(unit, writes=False) as planes:
            return self._copies(unit, planes, fence, buffer)

    def _copies(self, unit: Unit, planes: Mapping[str, Plane], fence: Fence, buffer: Tensor) -> tuple[dict[str, Plane], Tensor]:
        backend = self._engine.backend
        on_device = unit.index in self._engine.store.on_device
        backend.wait(Lane.DOWNLOAD if on_device else Lane.HOST, fence)
        found = {}
        for kind, plane in self._saved_planes(planes).items():
            num_bytes = plane.buffer.numel()
            landed = buffer[:num_bytes]
            if on_device:
                backend.copy(Lane.DOWNLOAD, landed, plane.buffer)
            else:
                backend.touch(Lane.HOST, reads=[plane.buffer])
                landed.copy_(plane.buffer)
            found[kind] = Plane(plane.layout, plane.spec, landed)
            buffer = buffer[_aligned(num_bytes) :]
        if on_device:
            backend.record(Lane.DOWNLOAD).synchronize()
        return found, buffer

    def _saved_planes(self, planes: Mapping[str, Plane]) -> dict[str, Plane]:
        return {kind: plane for kind, plane in planes.items() if kind == WEIGHT or not (kind == GRAD or self._model_only)}

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_written += num_bytes

    def _put_in_place(self, partial: Path, folder: Path) -> None:
        if os.path.lexists(folder):  # of an earlier run, or of the run before it was taken up at an older checkpoint
            hidden = self._output_dir / f"{REPLACED}{folder.name}"
            self._files.remove(hidden)
            self._files.rename(folder, hidden)
            try:
                self._files.rename(partial, folder)
            except OSError:
                self._files.rename(hidden, folder)
                raise
        else:
            self._files.rename(partial, folder)
        self._files.sync_folder(self._output_dir)


def _let_go(hold: Hold, fence: Fence) -> None:
    """The unit's next update may come, behind ``fence``; nothing where it may already."""
    if not hold.released.done():
        hold.released.set_result(fence)


def _aligned(num_bytes: int) -> int:
    return round_up(num_bytes, ALIGN_BYTES)


def _failed(folder: Path, begin: float, error: Exception) -> Saved:
    reason = reason_of(error) if isinstance(error, OSError) else str(error)
    return Saved(folder=folder, num_bytes=0, seconds=time.monotonic() - begin, fault=reason)
