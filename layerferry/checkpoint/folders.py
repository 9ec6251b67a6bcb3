"""Which checkpoints an output folder has, which of them a run takes up, and which may go.

``checkpoint-N`` is LLaMA-Factory's name. Beside them stands ``latest``, a line of JSON: the run that last wrote here, and its
newest checkpoint. It settles the one case that numbers cannot: a run with ``overwrite_output_dir`` that stops early must not be
"resumed" from a later checkpoint of the run that it has replaced. The marker moves last, so between a checkpoint's
rename and the marker's the newer number of the same run is right. Checked by ``tests/checkpoint/test_folders.py``.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from layerferry.checkpoint.files import Files, replace_file
from layerferry.checkpoint.manifest import Manifest
from layerferry.errors import CheckpointError

LATEST = "latest"
PARTIAL = ".partial-"
"""Hidden folders that are being written or removed; leftovers of a run that was killed."""

_NAME = re.compile(r"checkpoint-(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The run that an output folder belongs to, and the name of its newest checkpoint (None: it has none yet)."""

    run: str
    checkpoint: str | None


def name_of(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int | None:
    """N of ``checkpoint-N``; None for another name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints(output_dir: Path) -> list[Path]:
    """The folders named ``checkpoint-N``, newest first; whether they are whole is not looked at."""
    if not output_dir.is_dir():
        return []
    found = [(step, path) for path in output_dir.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def read_latest(output_dir: Path) -> Latest | None:
    """The marker; None where there is none that can be read: numbers decide then."""
    try:
        value = json.loads((output_dir / LATEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("run"), str):
        return None
    name = value.get("checkpoint")
    return Latest(run=value["run"], checkpoint=name if isinstance(name, str) and _NAME.fullmatch(name) else None)


def write_latest(files: Files, output_dir: Path, latest: Latest) -> None:
    text = json.dumps({"run": latest.run, "checkpoint": latest.checkpoint}) + "\n"
    replace_file(files, output_dir / LATEST, text.encode("utf-8"))


def candidates(output_dir: Path) -> list[Path]:
    """Checkpoints that the folder's own run may be resumed from, newest first. A damaged manifest counts as one: it must be
    spoken of, not passed over."""
    latest = read_latest(output_dir)
    found = []
    for path in checkpoints(output_dir):
        try:
            run = Manifest.read(path).run
        except CheckpointError:
            run = None
        if latest is None or run is None or run == latest.run:
            found.append(path)
    return found


def open_checkpoint(folder: Path) -> Manifest:
    """The manifest of a checkpoint that can be resumed, with every file's size right; the bytes are summed when they are read.

    Raises ``CheckpointError`` that names the fault and, where there is one, an older checkpoint that is whole.
    """
    try:
        manifest = Manifest.read(folder)
        if not manifest.resumable:
            raise CheckpointError(
                f"{folder}: holds the model only (save_only_model): a run cannot be resumed from it. To start anew from its "
                "weights, name it as model_name_or_path and set overwrite_output_dir: true or another output_dir"
            )
        manifest.check_sizes(folder)
    except CheckpointError as error:
        raise with_offer(error, folder) from error
    return manifest


def with_offer(error: CheckpointError, folder: Path) -> CheckpointError:
    """``error`` with the next older checkpoint beside ``folder`` that is whole in every byte."""
    older = older_whole(folder)
    if older is None:
        return CheckpointError(f"{error}. There is no older whole checkpoint beside it")
    return CheckpointError(f"{error}. The next older whole one: set resume_from_checkpoint: {older}")


def older_whole(folder: Path) -> Path | None:
    """The newest checkpoint beside ``folder`` that is older, can be resumed, and has no damage anywhere."""
    step = step_of(folder)
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="verify") as pool:
        for path in checkpoints(folder.parent):
            number = step_of(path)
            if step is not None and number is not None and number >= step:
                continue
            try:
                manifest = Manifest.read(path)
                manifest.check(path, pool)
            except CheckpointError:
                continue
            if manifest.resumable and path != folder:
                return path
    return None


def remove_old(files: Files, output_dir: Path, *, run: str, keep: int | None) -> list[Path]:
    """Remove this run's oldest checkpoints beyond ``keep``; each leaves its name before its bytes go, so none is ever half."""
    own = []
    for path in checkpoints(output_dir):
        try:
            own += [path] if Manifest.read(path).run == run else []
        except CheckpointError:
            continue
    gone = own[max(keep, 1) :] if keep is not None else []
    for hidden in output_dir.glob(f"{PARTIAL}re*"):  # replaced ones, and what could not be removed before
        files.remove(hidden)
    for path in gone:
        hidden = output_dir / f"{PARTIAL}removed-{path.name}"
        files.rename(path, hidden)
        files.remove(hidden)
    return gone


def clear_leftovers(files: Files, output_dir: Path) -> None:
    """Remove what a killed run has left half written."""
    if output_dir.is_dir():
        for path in output_dir.iterdir():
            if path.name.startswith(PARTIAL) or path.name.startswith(f".{LATEST}{PARTIAL}"):
                files.remove(path)
