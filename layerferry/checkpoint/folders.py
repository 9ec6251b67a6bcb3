"""Which checkpoints an output folder has, which of them a run takes up, and which may go.

``checkpoint-N`` is LLaMA-Factory's name, and N alone does not say whose it is: a run that was resumed from checkpoint-8 beside a
checkpoint-12 leaves that one behind, as a run with ``overwrite_output_dir`` leaves all of them. So every process that trains is a
*run* of its own, and its *line* names the runs that it goes on from, each with the step at which it was left. Both stand in every
manifest, and in ``latest``, a line of JSON beside the checkpoints that a run writes before its first step. A checkpoint is
*on the line* of a run if that run wrote it, or one before it up to the step where that was left. What is not is spoken of
and left alone: it is neither taken up, nor counted, nor removed, until the run writes a checkpoint of the same name. The marker
moves once more behind every save, but nothing depends on that: a checkpoint whose rename was the last deed of its run is on the
line because of the run that wrote it. Checked by ``tests/checkpoint/test_folders.py`` and ``tests/reliability/test_machine.py``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from layerferry.checkpoint.files import Files, read_small, replace_file
from layerferry.checkpoint.manifest import Manifest, is_line
from layerferry.errors import CheckpointError

LATEST = "latest"
PARTIAL = ".partial-"
"""Hidden folders that are being written or removed; leftovers of a run that was killed."""

REPLACED = f"{PARTIAL}replaced-"
"""A checkpoint that another of the same name takes the place of."""

_NAME = re.compile(r"checkpoint-(\d{1,18})")
_LEFTOVER = re.compile(rf"{re.escape(PARTIAL)}.*|\..+{re.escape(PARTIAL)}\d+")
"""Of what is written under another name first: hidden folders, and files on their way into ``replace_file``."""

MAX_MARKER_BYTES = 1 << 24


Line = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The run that an output folder belongs to, and the name of the newest checkpoint on its line (None: it has none yet)."""

    run: str
    checkpoint: str | None
    line: Line = ()

    def has(self, manifest: Manifest) -> bool:
        """Whether a checkpoint is on the line."""
        return _is_on(manifest, self.run, self.line)


def _is_on(manifest: Manifest, run: str, line: Line) -> bool:
    return manifest.run == run or any(manifest.run == one and manifest.step <= step for one, step in line)


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
        value = json.loads(read_small(output_dir / LATEST, MAX_MARKER_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("run"), str) or not is_line(value.get("line", [])):
        return None
    name = value.get("checkpoint")
    return Latest(
        run=value["run"],
        checkpoint=name if isinstance(name, str) and _NAME.fullmatch(name) else None,
        line=tuple((run, step) for run, step in value.get("line", [])),
    )


def write_latest(files: Files, output_dir: Path, latest: Latest) -> None:
    text = json.dumps({"run": latest.run, "checkpoint": latest.checkpoint, "line": latest.line}) + "\n"
    replace_file(files, output_dir / LATEST, text.encode("utf-8"))


def candidates(output_dir: Path) -> list[Path]:
    """Checkpoints that the folder's own run may be resumed from, newest first."""
    return [path for path, _ in on_line(output_dir, read_latest(output_dir))]


def on_line(output_dir: Path, latest: Latest | None) -> list[tuple[Path, Manifest | None]]:
    """Checkpoints on the line of ``latest``, newest first; all of them where there is no marker.

    One without a manifest that can be read (None) cannot say whose it is. Up to the number of the newest one on the line it
    counts as one of them, for it must be spoken of and not passed over; beyond that it was left behind.
    """
    newest = -1 if latest is None or latest.checkpoint is None else step_of(Path(latest.checkpoint)) or 0
    found = []
    for path in checkpoints(output_dir):
        manifest, number = _manifest_of(path), step_of(path) or 0
        if latest is None or (number <= newest if manifest is None else latest.has(manifest)):
            found.append((number if manifest is None else manifest.step, path, manifest))
    found.sort(key=lambda one: one[0], reverse=True)
    return [(path, manifest) for _, path, manifest in found]


def left_behind(output_dir: Path, latest: Latest) -> list[Path]:
    """Checkpoints that are not on the line of ``latest``, newest first."""
    own = {path for path, _ in on_line(output_dir, latest)}
    return [path for path in checkpoints(output_dir) if path not in own]


def newest_resumable(found: list[tuple[Path, Manifest | None]]) -> Path | None:
    """The first of what ``on_line`` has found that is no model alone."""
    return next((path for path, manifest in found if manifest is not None and manifest.resumable), None)


def _manifest_of(folder: Path) -> Manifest | None:
    try:
        return Manifest.read(folder)
    except CheckpointError:
        return None


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
    """The newest checkpoint beside ``folder`` that comes before it, can be resumed, and has no damage anywhere."""
    before = _comes_before(folder)
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="verify") as pool:
        for path, manifest in on_line(folder.parent, None):
            if manifest is None or path == folder or not before(manifest):
                continue
            try:
                manifest.check(path, pool)
            except CheckpointError:
                continue
            if manifest.resumable:
                return path
    return None


def _comes_before(folder: Path) -> Callable[[Manifest], bool]:
    """Whether another one is older and on the same line: that of ``latest``, or ``folder``'s own where it was left behind."""
    own, latest = _manifest_of(folder), read_latest(folder.parent)
    step = step_of(folder) if own is None else own.step

    def before(other: Manifest) -> bool:
        if step is not None and other.step >= step:
            return False
        if latest is None:
            return True
        return latest.has(other) if own is None or latest.has(own) else _is_on(other, own.run, own.line)

    return before


def remove_old(files: Files, output_dir: Path, latest: Latest, *, keep: int | None, unproven: int | None = None) -> list[Path]:
    """Remove the oldest checkpoints on the line beyond ``keep``, but never the newest one that can be resumed, nor, while no
    finite step has been taken behind that of step ``unproven``, the newest one before it that can be. Each leaves its name before
    its bytes go, so none is ever half. A folder with another name than its step's is somebody's own, and stays. One that cannot
    be removed keeps none of the others: the first such fault is raised at the end."""
    faults = _remove_each(files, output_dir.glob(f"{PARTIAL}re*"))  # replaced ones, and what could not be removed before
    gone = []
    if keep is not None:
        found = on_line(output_dir, latest)
        own = [path for path, manifest in found if manifest is not None and path.name == name_of(manifest.step)]
        before = [one for one in found if unproven and one[1] is not None and one[1].step < unproven]
        spared = (newest_resumable(found), newest_resumable(before))
        gone = [path for path in own[max(keep, 1) :] if path not in spared]
    for path in gone:
        hidden = output_dir / f"{PARTIAL}removed-{path.name}"
        try:
            files.rename(path, hidden)
            files.remove(hidden)
        except OSError as error:
            faults[hidden] = error
    for fault in faults.values():
        raise fault
    return gone


def _remove_each(files: Files, paths: Iterable[Path]) -> dict[Path, OSError]:
    """Remove what can be; what cannot, and why."""
    faults = {}
    for path in paths:
        try:
            files.remove(path)
        except OSError as error:
            faults[path] = error
    return faults


def put_back(files: Files, output_dir: Path) -> list[Path]:
    """Give a checkpoint its name again that was on its way out when the run was killed, before a new one had taken the name."""
    found = []
    for hidden in sorted(output_dir.glob(f"{REPLACED}*")):
        path = output_dir / hidden.name.removeprefix(REPLACED)
        if _NAME.fullmatch(path.name) and not os.path.lexists(path):
            files.rename(hidden, path)
            found.append(path)
    return found


def clear_leftovers(files: Files, output_dir: Path) -> dict[Path, OSError]:
    """Remove what a killed run has left half written; what cannot be, which costs room only."""
    there = sorted(output_dir.iterdir()) if output_dir.is_dir() else []
    return _remove_each(files, (path for path in there if _LEFTOVER.fullmatch(path.name)))
