"""Which checkpoint a run takes up: LLaMA-Factory's rules.

An explicit ``resume_from_checkpoint`` is taken; without one, the newest checkpoint of ``output_dir``, unless
``overwrite_output_dir``. Weights without a checkpoint are an error: they are the results of a run that has ended.
A checkpoint that is damaged, foreign or of a model alone is found here, and the next older whole one is named.
Checked by ``tests/trainer/test_resume.py``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from layerferry.checkpoint.folders import candidates, checkpoints, open_checkpoint, read_latest, with_offer
from layerferry.checkpoint.manifest import Manifest
from layerferry.checkpoint.restore import check_weights, restore
from layerferry.config import RESUME_NEVER, RESUME_NEWEST, TrainConfig
from layerferry.engine.engine import Engine
from layerferry.errors import CheckpointError, ConfigError
from layerferry.trainer.folder import earlier_results
from layerferry.trainer.state import RunState

logger = logging.getLogger("layerferry.trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A checkpoint to go on from. Its sizes are right and its small files are read; the rest is summed when it is loaded."""

    folder: Path
    manifest: Manifest
    state: RunState

    def check_weights(self) -> None:
        """Sum what the model is loaded from."""
        try:
            check_weights(self.folder, self.manifest)
        except CheckpointError as error:
            raise with_offer(error, self.folder) from error

    def restore(self, engine: Engine) -> None:
        """Give ``engine``, which has the checkpoint's weights, the rest of its state."""
        try:
            restore(engine, self.folder, self.manifest)
        except CheckpointError as error:
            raise with_offer(error, self.folder) from error


def find_start(config: TrainConfig) -> Start | None:
    """Where the run begins; None: at step 0."""
    folder = _folder(config)
    if folder is None:
        return None
    manifest = open_checkpoint(folder)
    try:
        return Start(folder=folder, manifest=manifest, state=RunState.read(folder))
    except CheckpointError as error:
        raise with_offer(error, folder) from error


def _folder(config: TrainConfig) -> Path | None:
    output_dir, wish = Path(config.output_dir), config.resume_from_checkpoint
    if not config.do_train or wish == RESUME_NEVER:
        return None
    if wish not in (None, RESUME_NEWEST):
        assert wish is not None
        return Path(wish)
    if wish is None and config.overwrite_output_dir:
        _say_what_is_passed_over(output_dir)
        return None
    found = candidates(output_dir)
    if found:
        return found[0]
    replaced = checkpoints(output_dir)
    if replaced:
        latest = read_latest(output_dir)
        raise ConfigError(
            f"output_dir: {output_dir}: the run that wrote here last ({latest.run if latest else 'unknown'}) has no checkpoint, "
            f"{replaced[0].name} is of an earlier one. Set resume_from_checkpoint: {replaced[0]}, or overwrite_output_dir: true"
        )
    if wish == RESUME_NEWEST:
        raise ConfigError(f"resume_from_checkpoint: {output_dir} has no checkpoint to resume; remove the key to start anew")
    results = earlier_results(output_dir)
    if results is not None:
        raise ConfigError(
            f"output_dir: {output_dir} holds {results} of an earlier run and no checkpoint; "
            "set overwrite_output_dir: true, or another output_dir"
        )
    return None


def _say_what_is_passed_over(output_dir: Path) -> None:
    """A run that starts anew beside a checkpoint says so: the key may stand in the file from another day."""
    for folder in checkpoints(output_dir)[:1]:
        try:
            resumable = Manifest.read(folder).resumable
        except CheckpointError:
            resumable = False
        remedy = f"; resume_from_checkpoint={folder} goes on from it" if resumable else ""
        logger.info("%s is left alone: overwrite_output_dir is true%s", folder.name, remedy)
