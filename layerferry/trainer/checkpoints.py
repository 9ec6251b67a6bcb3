"""Saving a model while a run goes on, and at its end.

A checkpoint is a Hugging Face model folder with ``trainer_state.json``; whatever more a resumed run will need belongs
into ``save_checkpoint``. It is written beside its place and renamed, so a full disk leaves the earlier checkpoints
whole and the run alive. Leaves out: optimizer state, resuming. Checked by ``tests/trainer/test_checkpoints.py``.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any, Protocol

from layerferry.errors import LayerFerryError
from layerferry.trainer.folder import whole_files, whole_folder
from layerferry.trainer.history import History

logger = logging.getLogger("layerferry.trainer")


class Saver(Protocol):
    """What is asked of the engine here."""

    def settle(self) -> None: ...

    def save_pretrained(self, folder: Path, *, tokenizer: Any = None) -> None: ...


def save_checkpoint(folder: Path, engine: Saver, tokenizer: Any, history: History) -> None:
    """Write ``checkpoint-N`` whole, or not at all."""
    engine.settle()
    with whole_folder(folder) as filled:
        engine.save_pretrained(filled, tokenizer=tokenizer)
        history.write_state(filled)


def save_model(folder: Path, engine: Saver, tokenizer: Any) -> None:
    """Write the trained model into the output folder."""
    engine.settle()
    try:
        with whole_files(folder) as filled:
            engine.save_pretrained(filled, tokenizer=tokenizer)
    except OSError as error:
        raise LayerFerryError(f"the trained model could not be saved into {folder}: {error.strerror or error}") from error


class Checkpoints:
    """The checkpoints of this run; those of an earlier one are never touched unless a new one has their name."""

    def __init__(self, output_dir: Path, keep: int | None) -> None:
        self._output_dir = output_dir
        self._keep = keep
        self._written: list[Path] = []

    def save(self, step: int, engine: Saver, tokenizer: Any, history: History) -> None:
        """Save ``checkpoint-<step>``, then remove the oldest beyond the limit. A failure is reported, and training goes on."""
        folder = self._output_dir / f"checkpoint-{step}"
        try:
            save_checkpoint(folder, engine, tokenizer, history)
        except OSError as error:
            logger.error("%s could not be saved (%s); training goes on", folder, error.strerror or error)
            return
        logger.info("saved %s", folder)
        self._written.append(folder)
        while self._keep is not None and len(self._written) > self._keep:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
