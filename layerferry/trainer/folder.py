"""The output folder: whether it may be used, what a run clears away when it begins, and what it misses at the end.

It is locked and tried before anything else: an unwritable place, a directory where a file belongs, another run or its
results are found in a second instead of after an hour. Trying leaves nothing behind. Leaves out: how files get there
(``output``). Checked by ``tests/trainer/test_folder.py``.
"""

from __future__ import annotations

import logging
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layerferry.checkpoint.files import reason_of
from layerferry.checkpoint.folders import LATEST, clear_leftovers, put_back
from layerferry.checkpoint.lock import FolderLock, LockedFiles
from layerferry.checkpoint.manifest import MANIFEST
from layerferry.config import Config, TrainConfig
from layerferry.errors import ConfigError, LayerFerryError
from layerferry.trainer.history import ALL_RESULTS, LOG_NAME
from layerferry.trainer.output import OutputFolder

WEIGHT_SUFFIXES = {".safetensors", ".bin"}
OWN_SUFFIXES = {".json", ".jsonl", ".jinja", ".md", ".png", ".safetensors"}
"""Of the files that a run leaves in its folder."""

logger = logging.getLogger("layerferry.trainer")


def claim(config: TrainConfig) -> FolderLock:
    """The output folder for this run alone. ConfigError where another run has it, or the results could not be written there;
    whose results are there already is ``resume``'s question, and no longer changes while it is asked."""
    if not config.output_dir.strip():
        raise ConfigError("output_dir: empty; name the folder that the results go to")
    folder = Path(config.output_dir)
    if (folder / MANIFEST).is_file():
        raise ConfigError(f"output_dir: {folder} is a checkpoint, and results would replace its files: use another output_dir")
    lock = FolderLock(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"layerferry")
        for path in sorted(folder.iterdir()):
            _check_place(path)
        for path in put_back(LockedFiles(lock), folder):
            logger.info("%s: put back; the run before was killed while it replaced it", path)
    except OSError as error:
        lock.close()
        raise ConfigError(f"output_dir: {folder} cannot be written: {reason_of(error)}") from error
    except ConfigError:
        lock.close()
        raise
    return lock


def check_source(config: Config) -> None:
    """``ConfigError`` where the results would replace the very model that training starts from."""
    source, folder = Path(config.model.model_name_or_path), Path(config.train.output_dir)
    if config.train.do_train and source.is_dir() and folder.is_dir() and source.samefile(folder):
        raise ConfigError(
            f"output_dir: {folder} is the model that training starts from (model_name_or_path), and its weights would be "
            "replaced: use another output_dir"
        )


def _check_place(path: Path) -> None:
    """Raise where a file of the run could not be put: found now, and not after the last step."""
    if path.name != LATEST and path.suffix not in OWN_SUFFIXES:
        return
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode) and path.name == LOG_NAME:
        raise ConfigError(f"output_dir: {path} is a link, and the log is written in place: remove it")
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        kind = "directory" if stat.S_ISDIR(mode) else "pipe or device"
        raise ConfigError(f"output_dir: {path} is a {kind} where a file of the run belongs: move it away")


def earlier_results(folder: Path) -> str | None:
    """The name of a checkpoint or weight file in ``folder``, if there is one."""
    if not folder.is_dir():
        return None
    return next((path.name for path in sorted(folder.iterdir()) if _is_checkpoint(path) or _is_weights(path)), None)


def earlier_weights(folder: Path) -> str | None:
    """The name of a weight file in ``folder``, if there is one."""
    return next((path.name for path in sorted(folder.iterdir()) if _is_weights(path)), None) if folder.is_dir() else None


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and path.name.startswith("checkpoint-")


def _is_weights(path: Path) -> bool:
    return path.is_file() and path.suffix in WEIGHT_SUFFIXES and path.name != "training_args.bin"


def clear(output: OutputFolder, config: TrainConfig, *, resumes: bool = False) -> None:
    """Take away the leftovers of a run that was killed. A run that trains anew, and does not resume, begins without an earlier
    log; one that only evaluates adds to what is there. ``ConfigError`` where the disk refuses."""
    try:
        output.files.check()
        if config.do_train and not resumes:
            output.remove(LOG_NAME)
        if config.do_train:
            output.remove(ALL_RESULTS)
    except OSError as error:
        raise ConfigError(f"output_dir: {output.path} cannot be written: {reason_of(error)}") from error
    for path, fault in clear_leftovers(output.files, output.path).items():
        logger.warning("%s, a leftover of a run that was killed, cannot be removed: %s", path, reason_of(fault))


class Records:
    """Files that a run leaves beside its model: one that cannot be written is told, and costs neither the others nor the
    model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.missing: list[str] = []

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if name not in self.missing:  # what an evaluation adds to is written twice
                self.missing.append(name)
            logger.error("%s cannot be written: %s", self._folder / name, reason_of(error))

    def close(self, what_is_there: str) -> None:
        """Raise where something is missing."""
        if self.missing:
            raise LayerFerryError(f"{what_is_there}, but not written were: {', '.join(self.missing)} (reasons above)")
