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

from layerferry.checkpoint.files import Files
from layerferry.checkpoint.folders import PARTIAL, clear_leftovers
from layerferry.config import TrainConfig
from layerferry.errors import ConfigError
from layerferry.trainer.history import LOG_NAME

WEIGHT_SUFFIXES = {".safetensors", ".bin"}


def check_folder(config: TrainConfig) -> None:
    """Raise ConfigError where the run could not write its results; whose results are there already is ``resume``'s question."""
    if not config.output_dir.strip():
        raise ConfigError("output_dir: empty; name the folder that the results go to")
    folder = Path(config.output_dir)
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


def open_folder(config: TrainConfig, *, resumes: bool = False) -> Path:
    """Make the folder, without the leftovers of a run that was killed and, unless the run ``resumes``, without an earlier log."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if not resumes:
        (folder / LOG_NAME).unlink(missing_ok=True)
    (folder / "all_results.json").unlink(missing_ok=True)
    clear_leftovers(Files(), folder)
    return folder


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """A folder to fill whose files are moved into ``folder`` when all went well."""
    work = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
    try:
        yield work
        for path in sorted(work.iterdir()):
            path.replace(folder / path.name)
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
