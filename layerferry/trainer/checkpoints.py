"""Saving while a run goes on, and the model at its end.

The bytes are the work of ``layerferry/checkpoint``; here stands when, with which small files beside them, and what a person is
told. Config and tokenizer are made once: they do not change. Checked by ``tests/trainer/test_checkpoints.py``.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any, Protocol

from layerferry.checkpoint.files import reason_of
from layerferry.checkpoint.folders import name_of, newest_resumable, on_line, read_latest
from layerferry.checkpoint.lock import FolderMoved
from layerferry.checkpoint.save import Saved, Saver
from layerferry.engine.engine import Engine
from layerferry.engine.pretrained import save_tokenizer
from layerferry.errors import CheckpointError, LayerFerryError
from layerferry.plan import size_text
from layerferry.trainer.history import STATE_NAME, History
from layerferry.trainer.output import OutputFolder
from layerferry.trainer.state import RunState

logger = logging.getLogger("layerferry.trainer")

WITHOUT = "(without overwrite_output_dir and resume_from_checkpoint)"
"""Keys with which the same command would begin elsewhere."""


class ModelSaver(Protocol):
    """What is asked of the engine for the last save."""

    def settle(self) -> None: ...

    def save_pretrained(self, folder: Path) -> None: ...


def save_model(output: OutputFolder, engine: ModelSaver) -> None:
    """Write the trained model into the output folder."""
    engine.settle()
    try:
        with output.filling() as filled:
            engine.save_pretrained(filled)
    except (OSError, CheckpointError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        reason = str(reason).rstrip(".")
        told = f"the trained model could not be saved into {output.path}: {reason}"
        raise LayerFerryError(f"{told}{_rescue(output, engine)}; {how_to_go_on(output)}") from error


def _rescue(output: OutputFolder, engine: ModelSaver) -> str:
    """Where the model is instead, if the folder is gone or another's by now: the last steps are in no checkpoint."""
    if _elsewhere(output) is None:
        return ""
    try:
        with output.beside() as folder:
            engine.save_pretrained(folder)
    except (OSError, CheckpointError):
        return ""
    return f"; its weights are in {folder} instead"


def save_tokenizer_beside(output: OutputFolder, tokenizer: Any) -> None:
    """Write the tokenizer beside the model; ``OSError``. It comes last and alone: weights must not be lost for want of what every
    copy of the model has."""
    if tokenizer is not None:
        with output.filling() as filled:
            save_tokenizer(tokenizer, filled)


def how_to_go_on(output: OutputFolder) -> str:
    """What the newest checkpoint that can be resumed is good for."""
    folder = output.path
    if (elsewhere := _elsewhere(output)) is not None:
        return f"{elsewhere}, the same command goes on from the newest checkpoint in it {WITHOUT}"
    newest = newest_resumable(on_line(folder, read_latest(folder)))
    if newest is None:
        return "the same command starts anew, for no checkpoint can be resumed"
    return f"the same command goes on from {newest.name} {WITHOUT}"


def _elsewhere(output: OutputFolder) -> str | None:
    """What must be done before the folder's checkpoints can be named; None: they are where they were."""
    try:
        output.files.check()
    except FolderMoved:
        return "with output_dir naming where it is now"
    except OSError:
        pass  # what is there still, if anything, is looked at
    return None if output.path.is_dir() else "when it is back"


def behind_a_spoilt_step(output: OutputFolder, step: int) -> str:
    """From where to go on when the step after ``step`` was not finite, and was taken or one of too many that were skipped.

    A checkpoint is proven by the step behind it: those before ``step`` have seen a finite loss, that of ``step`` has not, for its
    weights may be what made it.
    """
    folder = output.path
    if (elsewhere := _elsewhere(output)) is not None:
        return f"{elsewhere}, go on from its newest checkpoint before checkpoint-{step}: resume_from_checkpoint names it"
    found = [(path, manifest) for path, manifest in on_line(folder, read_latest(folder)) if manifest and manifest.resumable]
    proven = next((path for path, manifest in found if manifest and manifest.step < step), None)
    suspect = next((f"{path.name} may be spoilt too" for path, manifest in found if manifest and manifest.step == step), None)
    if proven is None:
        return "; ".join(filter(None, [suspect, "there is no checkpoint from before: start anew"]))
    return "; ".join(
        filter(None, [suspect, f"go on from the newest that a finite step has proven: resume_from_checkpoint: {proven}"])
    )


class Checkpoints:
    """The checkpoints of this run, written in the background one at a time. Called by the training loop only."""

    def __init__(self, saver: Saver, side_files: dict[str, bytes]) -> None:
        self._saver, self._side_files = saver, side_files
        self._last: tuple[int, bool] | None = None  # step of the newest attempt, and whether it is whole

    def save(self, step: int, state: RunState, history: History) -> None:
        """Begin ``checkpoint-<step>``; what is due while an earlier one is being written waits for it."""
        self.report(wait=True)
        if self.is_whole(step):
            return
        small = {**self._side_files, STATE_NAME: history.state_bytes(), **state.files()}
        self._last = (step, False)
        self._saver.start(step, small)

    def prove(self, step: int) -> None:
        """Step ``step`` was finite."""
        self._saver.prove(step)

    def report(self, *, wait: bool) -> Saved | None:
        """Say how the newest save has ended, where it has. A fault of the disk is an error in the log, and training goes on."""
        outcome = self._saver.take_outcome(wait=wait)
        if outcome is None:
            return None
        if outcome.fault is None:
            assert self._last is not None
            self._last = (self._last[0], True)
            rate = outcome.num_bytes / max(outcome.seconds, 1e-9)
            logger.info(
                "saved %s (%s in %.1f s, %.2f GB/s; updates waited %.1f s)",
                *(outcome.folder, size_text(outcome.num_bytes), outcome.seconds, rate / 1e9, outcome.held_s),
            )
            if outcome.note is not None:
                logger.warning("%s: %s", outcome.folder, outcome.note)
        else:
            logger.error(
                "%s could not be saved: %s; earlier checkpoints are untouched, training goes on", outcome.folder, outcome.fault
            )
        return outcome

    def is_whole(self, step: int) -> bool:
        """Whether ``checkpoint-<step>`` was written by this process and has ended well."""
        return self._last == (step, True)

    @property
    def is_busy(self) -> bool:
        return self._saver.is_busy

    @property
    def bytes_written(self) -> int:
        return self._saver.bytes_written

    @staticmethod
    def name(step: int) -> str:
        return name_of(step)


def side_files(engine: Engine, tokenizer: Any) -> dict[str, bytes]:
    """Config, generation config and tokenizer as ``save_pretrained`` writes them: name to content."""
    with tempfile.TemporaryDirectory(prefix="layerferry-") as made:
        folder = Path(made)
        try:
            engine.folder.write_config(folder, engine.store)
            if tokenizer is not None:
                save_tokenizer(tokenizer, folder)
        except OSError as error:
            reason = error.strerror or error
            raise LayerFerryError(f"{folder}: {reason}: free the disk of temporary files, or set TMPDIR to another") from error
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
