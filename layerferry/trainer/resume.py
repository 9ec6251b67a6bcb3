"""Which checkpoint a run takes up: LLaMA-Factory's rules.

An explicit ``resume_from_checkpoint`` is taken; without one, the newest checkpoint on the line of ``output_dir`` (``folders``),
unless ``overwrite_output_dir``. Weights without a checkpoint are an error: they are the results of a run that has ended; told to
start anew all the same, a run says what it passes over. A checkpoint that is damaged or of a model alone is found here,
and the next older whole one is named; where the settings are another run's, an older one would not fit either, and none
is. Checked by ``tests/trainer/test_resume.py``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from layerferry.checkpoint.folders import (
    Latest,
    candidates,
    checkpoints,
    left_behind,
    newest_resumable,
    on_line,
    open_checkpoint,
    read_latest,
    step_of,
    with_offer,
)
from layerferry.checkpoint.manifest import MANIFEST, Manifest
from layerferry.checkpoint.restore import OtherState, check_files, check_weights, restore
from layerferry.config import RESUME_NEVER, RESUME_NEWEST, TrainConfig
from layerferry.engine.engine import Engine
from layerferry.errors import CheckpointError, ConfigError
from layerferry.trainer.folder import earlier_results, earlier_weights
from layerferry.trainer.history import LOG_NAME
from layerferry.trainer.state import RUN_STATE, RunState

logger = logging.getLogger("layerferry.trainer")

MOST_NAMES = 5
"""Of checkpoints in one line."""


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
        except OtherState:
            raise
        except CheckpointError as error:
            raise with_offer(error, self.folder) from error


def find_start(config: TrainConfig) -> Start | None:
    """Where the run begins; None: at step 0."""
    folder = _folder(config)
    if folder is None:
        return None
    manifest = open_checkpoint(folder)
    try:  # what is read now is summed now: a flipped bit in it would be taken for other data
        check_files(folder, manifest, [name for name in (RUN_STATE, LOG_NAME) if name in manifest.files])
        return Start(folder=folder, manifest=manifest, state=RunState.read(folder))
    except CheckpointError as error:
        raise with_offer(error, folder) from error


def latest_of(start: Start | None, run: str, output_dir: Path) -> Latest:
    """The marker of a run that begins at ``start``."""
    if start is None:
        return Latest(run=run, checkpoint=None)
    beside = start.folder.absolute().parent.resolve() == output_dir.resolve()  # the folder itself may be a link
    return Latest(
        run=run,
        checkpoint=start.folder.name if beside and step_of(start.folder) is not None else None,
        line=(*start.manifest.line, (start.manifest.run, start.manifest.step)),
    )


def _folder(config: TrainConfig) -> Path | None:
    output_dir, wish = Path(config.output_dir), config.resume_from_checkpoint
    if not config.do_train:
        return None
    if wish not in (None, RESUME_NEWEST, RESUME_NEVER):
        assert wish is not None
        _refuse_missing(Path(wish), config)
        return Path(wish)
    if wish == RESUME_NEVER or (wish is None and config.overwrite_output_dir):
        key = "resume_from_checkpoint is false" if wish == RESUME_NEVER else "overwrite_output_dir is true"
        _say_what_is_passed_over(output_dir, key)
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


def _refuse_missing(folder: Path, config: TrainConfig) -> None:
    """A name that leads nowhere is no half checkpoint: it is mistyped, or ``save_total_limit`` has removed what it named."""
    if folder.exists():
        inside = [] if (folder / MANIFEST).exists() else candidates(folder)
        if inside:
            raise CheckpointError(f"resume_from_checkpoint: {folder} is no checkpoint; the newest in it: {inside[0]}")
        return
    error = CheckpointError(f"resume_from_checkpoint: {folder} is not there")
    output_dir = Path(config.output_dir)
    newest = next(iter(candidates(output_dir)), None)
    if newest is None or not _is_whole(newest):
        raise with_offer(error, folder)
    keys = "the key and overwrite_output_dir" if config.overwrite_output_dir else "the key"
    raise CheckpointError(f"{error}. Without {keys} the run goes on from {newest}, the newest whole one in output_dir")


def _is_whole(folder: Path) -> bool:
    try:
        open_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def _say_what_is_passed_over(output_dir: Path, key: str) -> None:
    """A run that starts anew beside results says so: the key may stand in the file from another day."""
    for folder in checkpoints(output_dir)[:1]:
        try:
            resumable = Manifest.read(folder).resumable
        except CheckpointError:
            resumable = False
        remedy = f"; resume_from_checkpoint={folder} goes on from it" if resumable else ""
        logger.info("%s is left alone: %s%s", folder.name, key, remedy)
    weights = earlier_weights(output_dir)
    if weights is not None:
        logger.info("%s of an earlier run is replaced when this one ends: %s", output_dir / weights, key)


def say_what_is_left_behind(start: Start, latest: Latest, output_dir: Path, *, model_only: bool, keep: int | None) -> None:
    """Checkpoints that the run does not go on from, and the one that its limit spares."""
    others = left_behind(output_dir, latest)
    if others:
        names = ", ".join(path.name for path in others[:MOST_NAMES])
        names += f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
        logger.warning(
            "%s: not on the line of %s, which this run goes on from: left alone and not counted by save_total_limit, until a "
            "checkpoint of the same name is written (resume_from_checkpoint: %s goes back to that line)",
            *(names, start.folder.name, others[0]),
        )
    spared = newest_resumable(on_line(output_dir, latest)) if model_only and keep is not None else None
    if spared is not None:
        logger.info("%s stays beside save_total_limit: %d: save_only_model writes none that can be resumed", spared.name, keep)
