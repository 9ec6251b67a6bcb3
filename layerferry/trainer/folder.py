"""The output folder: whether it may be used, and how files get into it whole.

It is tried before a model is loaded: an unwritable place, or the results of another run, are found in a second
instead of after an hour. Trying leaves nothing behind. Whatever is large is written into a hidden folder inside the
output folder, on the same file system, and moved at the end. Checked by ``tests/trainer/test_folder.py``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layerferry.config import RESUME_NEVER, TrainConfig
from layerferry.errors import ConfigError
from layerferry.trainer.history import LOG_NAME

PARTIAL_PREFIX = ".partial-"
WEIGHT_SUFFIXES = {".safetensors", ".bin"}


def check_folder(config: TrainConfig) -> None:
    """Raise ConfigError where the run could not write its results, or would mix them with those of another run."""
    folder = Path(config.output_dir)
    if config.resume_from_checkpoint not in (None, RESUME_NEVER):
        raise ConfigError(f"resume_from_checkpoint: {config.resume_from_checkpoint}: resuming is not there yet; remove the key")
    if config.resume_from_checkpoint is None and not config.overwrite_output_dir and config.do_train:
        found = earlier_results(folder)
        if found is not None:
            raise ConfigError(
                f"output_dir: {folder} holds {found} of an earlier run; set overwrite_output_dir: true, or another output_dir"
            )
    try:
        _try_writing(folder)
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be written: {error.strerror or error}") from error


def earlier_results(folder: Path) -> str | None:
    """The name of a checkpoint or weight file in ``folder``, if there is one."""
    if not folder.is_dir():
        return None
    for path in sorted(folder.iterdir()):
        is_checkpoint = path.is_dir() and path.name.startswith("checkpoint-")
        if is_checkpoint or (path.is_file() and path.suffix in WEIGHT_SUFFIXES and path.name != "training_args.bin"):
            return path.name
    return None


def open_folder(config: TrainConfig) -> Path:
    """Make the folder, without the log and the leftovers of an earlier run."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG_NAME).unlink(missing_ok=True)
    (folder / "all_results.json").unlink(missing_ok=True)
    for leftover in folder.glob(PARTIAL_PREFIX + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return folder


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of ``target`` when all went well, and vanishes when it did not."""
    with _partial(target.parent) as work:
        filled = work / target.name
        filled.mkdir()
        yield filled
        if target.exists():
            target.replace(work / "replaced")
        filled.replace(target)


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """A folder to fill whose files are moved into ``folder`` when all went well."""
    with _partial(folder) as work:
        yield work
        for path in sorted(work.iterdir()):
            path.replace(folder / path.name)


@contextmanager
def _partial(parent: Path) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix=PARTIAL_PREFIX, dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _try_writing(folder: Path) -> None:
    """Write and remove a file in ``folder``; folders made for that are removed too."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"layerferry")
    finally:
        for path in missing:
            if path.is_dir():
                path.rmdir()
