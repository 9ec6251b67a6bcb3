"""The output folder: whether it may be used, and how files get into it whole.

It is locked and tried before anything else: an unwritable place, a directory where a file belongs, another run or its
results are found in a second instead of after an hour. Trying leaves nothing behind. Whatever is large is written into a hidden
folder inside the output folder, on the same file system, and moved at the end. Checked by ``tests/trainer/test_folder.py``.
"""

from __future__ import annotations

import logging
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layerferry.checkpoint.files import Files, reason_of
from layerferry.checkpoint.folders import LATEST, PARTIAL, clear_leftovers, put_back
from layerferry.checkpoint.lock import FolderLock
from layerferry.config import TrainConfig
from layerferry.errors import ConfigError, LayerFerryError
from layerferry.store.safetensors_file import INDEX_FILE, SINGLE_FILE
from layerferry.trainer.history import ALL_RESULTS, LOG_NAME

WEIGHT_SUFFIXES = {".safetensors", ".bin"}
OWN_SUFFIXES = {".json", ".jsonl", ".jinja", ".md", ".png", ".safetensors"}
"""Of the files that a run leaves in its folder."""
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

logger = logging.getLogger("layerferry.trainer")


def claim(config: TrainConfig) -> FolderLock:
    """The output folder for this run alone. ConfigError where another run has it, or the results could not be written there;
    whose results are there already is ``resume``'s question, and no longer changes while it is asked."""
    if not config.output_dir.strip():
        raise ConfigError("output_dir: empty; name the folder that the results go to")
    folder = Path(config.output_dir)
    lock = FolderLock(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"layerferry")
        for path in sorted(folder.iterdir()):
            _check_place(path)
        for path in put_back(Files(), folder):
            logger.info("%s: put back; the run before was killed while it replaced it", path)
    except OSError as error:
        lock.close()
        raise ConfigError(f"output_dir: {folder} cannot be written: {reason_of(error)}") from error
    except ConfigError:
        lock.close()
        raise
    return lock


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


def _is_model(name: str) -> bool:
    return name in (INDEX_FILE, SINGLE_FILE) or _SHARD.fullmatch(name) is not None


def open_folder(config: TrainConfig, *, resumes: bool = False) -> Path:
    """Make the folder, without the leftovers of a run that was killed. A run that trains anew, and does not resume, begins
    without an earlier log; one that only evaluates adds to what is there."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.do_train and not resumes:
        (folder / LOG_NAME).unlink(missing_ok=True)
    if config.do_train:
        (folder / ALL_RESULTS).unlink(missing_ok=True)
    for path, error in clear_leftovers(Files(), folder).items():
        logger.warning("%s, a leftover of a run that was killed, cannot be removed: %s", path, reason_of(error))
    return folder


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """A folder to fill whose files are moved into ``folder`` when all went well.

    What tells readers which weights there are (one file, or an index) is moved last, and where shards come an earlier one goes
    first: a kill in between leaves a folder that says it has no model, never one that loads half of another. Weights of an
    earlier run that the new ones do not replace are removed: transformers would take a single file before an index.
    """
    work = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
    try:
        yield work
        new = sorted(path.name for path in work.iterdir())
        stale = [path for path in sorted(folder.iterdir()) if _is_model(path.name) and path.name not in new]
        doors = [name for name in (INDEX_FILE, SINGLE_FILE) if name in new]
        if INDEX_FILE in doors:
            (folder / INDEX_FILE).unlink(missing_ok=True)
            (folder / SINGLE_FILE).unlink(missing_ok=True)
        for name in (*(name for name in new if name not in doors), *doors):
            (work / name).replace(folder / name)
        for path in stale if doors else ():
            path.unlink(missing_ok=True)
        Files().sync_folder(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
