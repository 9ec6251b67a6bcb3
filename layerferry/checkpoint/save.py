"""Saving in the background: the run goes on, and a unit's next update waits only while that unit is being written.

``start`` takes a hold on every unit between two steps and returns. A thread then writes piece by piece, in the order in which
the next updates will come: it waits for the piece's own updates, writes straight from the planes (units that live
@device pass through one buffer @host), and lets go. So a checkpoint is the state after exactly one step, costs no copy of
the model, and training waits for it only where the disk needs longer than a step.

Everything goes into a hidden folder; small files and the manifest come last; then the folder gets its name, ``latest``
moves, and only then do old checkpoints go. A failure at any point leaves earlier checkpoints whole and the run alive:
it is kept for ``take_outcome``. Checked by ``tests/checkpoint/test_save.py`` and ``test_faults.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerferry.backends.base import Fence, Lane
from layerferry.checkpoint.checksum import SummedFile, sums_of
from layerferry.checkpoint.contents import Contents, FileToWrite, Piece, element_names
from layerferry.checkpoint.files import Files, reason_of, write_file
from layerferry.checkpoint.folders import PARTIAL, Latest, name_of, remove_old, write_latest
from layerferry.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from layerferry.engine.deferred import Hold
from layerferry.engine.engine import Engine
from layerferry.errors import CheckpointError
from layerferry.layout import GRAD, Plane
from layerferry.store.safetensors_file import INDEX_FILE, bytes_of
from layerferry.units import Unit
from layerferry.version import VERSION

ALIGN_BYTES = 256
"""Planes begin at multiples of this in the buffer that units @device land in."""

logger = logging.getLogger("layerferry.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that was written, or why it was not."""

    folder: Path
    num_bytes: int
    seconds: float
    fault: str | None
    """None: the checkpoint is whole and in its place."""
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
        keep: int | None = None,
        model_only: bool = False,
        files: Files | None = None,
    ) -> None:
        self._engine, self._output_dir, self._run, self._keep = engine, output_dir, run, keep
        self._model_only = model_only
        self._files = files or Files()
        self._contents = Contents(engine, model_only=model_only)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._adder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksum")
        self._landing = torch.empty(0, dtype=torch.uint8)
        self._pending: Future[Saved] | None = None
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
            raise CheckpointError(
                f"{self._output_dir}: a checkpoint needs {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free: "
                f"{(needed - free) / 2**30:.2f} GiB short. Free space, use another output_dir, or set save_only_model: true"
            )

    def check_model_space(self) -> None:
        """``CheckpointError`` where the disk has no room for the model at the end."""
        free = self._files.free_bytes(self._output_dir)
        if free < self.model_bytes:
            raise CheckpointError(
                f"{self._output_dir}: the trained model needs {self.model_bytes / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are "
                f"free: {(self.model_bytes - free) / 2**30:.2f} GiB short. Free space, or use another output_dir"
            )

    def start(self, step: int, small_files: Mapping[str, bytes]) -> None:
        """Begin ``checkpoint-<step>``; waits for the one before. ``small_files`` are written as they are."""
        assert self._pending is None, "the outcome of the checkpoint before must be taken first"
        folder = self._output_dir / name_of(step)
        try:
            self.check_space(more_bytes=sum(map(len, small_files.values())))
        except (CheckpointError, OSError) as error:
            self._pending = Future()
            self._pending.set_result(_failed(folder, time.monotonic(), error))
            return
        holds = {unit.index: self._engine.deferred.hold(unit) for unit in self._engine.update_order}
        self._pending = self._writer.submit(self._save, folder, step, dict(small_files), holds)

    def take_outcome(self, *, wait: bool) -> Saved | None:
        """How the checkpoint that was begun last has ended; None where there is none, or it has not ended and ``wait`` is off.

        An exception that is no fault of the disk (of the optimizer's thread, or ours) is raised.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def close(self) -> None:
        """Finish what is being written, and end the threads."""
        self._writer.shutdown(wait=True)
        self._adder.shutdown(wait=True)

    # ---------------------------------------------------------------- in the writing thread

    def _save(self, folder: Path, step: int, small_files: dict[str, bytes], holds: dict[int, Hold]) -> Saved:
        begin = time.monotonic()
        partial = self._output_dir / f"{PARTIAL}{folder.name}"
        try:
            try:
                num_bytes = self._fill(partial, step, small_files, holds)
                self._put_in_place(partial, folder)
            finally:
                self._let_go(holds)
                self._landing = torch.empty(0, dtype=torch.uint8)
        except (OSError, CheckpointError) as error:
            with suppress(OSError):
                self._files.remove(partial)
            return _failed(folder, begin, error)
        note = self._tidy(folder)
        return Saved(folder=folder, num_bytes=num_bytes, seconds=time.monotonic() - begin, fault=None, note=note)

    def _tidy(self, folder: Path) -> str | None:
        """What follows a checkpoint that is whole: ``latest`` moves, old ones go. A fault here costs nothing but room."""
        try:
            write_latest(self._files, self._output_dir, Latest(run=self._run, checkpoint=folder.name))
            for path in remove_old(self._files, self._output_dir, run=self._run, keep=self._keep):
                logger.info("removed %s: save_total_limit", path)
        except OSError as error:
            return f"earlier checkpoints could not be removed: {reason_of(error)}"
        return None

    def _fill(self, partial: Path, step: int, small_files: dict[str, bytes], holds: dict[int, Hold]) -> int:
        self._files.remove(partial)
        self._files.make_folder(partial)
        records: dict[str, FileRecord] = {}
        for piece in self._contents.pieces:
            self._write_piece(partial, piece, holds, records)
        for name, content in {**small_files, INDEX_FILE: self._contents.index}.items():
            write_file(self._files, partial / name, content)
            records[name] = FileRecord(num_bytes=len(content), sums=sums_of(content))
        manifest = Manifest(
            run=self._run,
            step=step,
            resumable=not self._model_only,
            state_planes=element_names(self._engine),
            files=records,
            versions={"layerferry": VERSION, "torch": str(torch.__version__)},
        )
        write_file(self._files, partial / MANIFEST, manifest.to_bytes())
        self._files.sync_folder(partial)
        return sum(record.num_bytes for record in records.values())

    def _write_piece(self, partial: Path, piece: Piece, holds: dict[int, Hold], records: dict[str, FileRecord]) -> None:
        with ExitStack() as stack:
            for unit in piece.units:
                planes = stack.enter_context(self._settled(unit, holds.pop(unit.index)))
                stack.enter_context(self._contents.seen(unit, planes))
            for file in piece.files:
                records[file.name] = self._write_tensors(partial / file.name, file)

    @contextmanager
    def _settled(self, unit: Unit, hold: Hold) -> Iterator[Mapping[str, Plane]]:
        """The planes of ``unit`` @host as the step has left them; its next update waits until the context is left."""
        backend, store = self._engine.backend, self._engine.store
        try:
            fence = hold.settled.result()
            planes = {kind: plane for kind, plane in store.planes(unit).items() if kind != GRAD}
            if unit.index in store.on_device:
                planes = self._downloaded(planes, fence)
                hold.released.set_result(backend.record(Lane.HOST))
            else:
                backend.wait(Lane.HOST, fence)
                backend.touch(Lane.HOST, reads=[plane.buffer for plane in planes.values()])
            yield planes
        finally:
            if not hold.released.done():
                hold.released.set_result(backend.record(Lane.HOST))

    def _downloaded(self, planes: Mapping[str, Plane], fence: Fence) -> dict[str, Plane]:
        """Copies @host, in one buffer that the units of a checkpoint use one after the other."""
        backend = self._engine.backend
        needed = sum(-(-plane.buffer.numel() // ALIGN_BYTES) * ALIGN_BYTES for plane in planes.values())
        if self._landing.numel() < needed:
            self._landing = torch.empty(needed, dtype=torch.uint8)
        backend.wait(Lane.DOWNLOAD, fence)
        found, cursor = {}, 0
        for kind, plane in planes.items():
            num_bytes = plane.buffer.numel()
            landed = self._landing[cursor : cursor + num_bytes]
            backend.copy(Lane.DOWNLOAD, landed, plane.buffer)
            found[kind] = Plane(plane.layout, plane.spec, landed)
            cursor += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        backend.record(Lane.DOWNLOAD).synchronize()
        return found

    def _write_tensors(self, path: Path, file: FileToWrite) -> FileRecord:
        with SummedFile(self._files, path, self._adder) as out:
            out.write(memoryview(file.header))
            for tensor in file.tensors:
                made = tensor.make()
                assert tuple(made.shape) == tuple(tensor.shape) and made.dtype == tensor.dtype, f"{tensor.name} has changed"
                out.write(_bytes(made))
                self.bytes_written += tensor.num_bytes
            out.sync()
            return FileRecord(num_bytes=out.num_bytes, sums=out.sums)

    def _put_in_place(self, partial: Path, folder: Path) -> None:
        if folder.exists():  # of an earlier run, or of the run before it was taken up at an older checkpoint
            hidden = self._output_dir / f"{PARTIAL}replaced-{folder.name}"
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

    def _let_go(self, holds: dict[int, Hold]) -> None:
        for hold in holds.values():
            hold.released.set_result(self._engine.backend.record(Lane.HOST))
        holds.clear()


def _failed(folder: Path, begin: float, error: Exception) -> Saved:
    reason = reason_of(error) if isinstance(error, OSError) else str(error)
    return Saved(folder=folder, num_bytes=0, seconds=time.monotonic() - begin, fault=reason)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes_of(flat.view(torch.uint8)) if flat.numel() else memoryview(b"")
