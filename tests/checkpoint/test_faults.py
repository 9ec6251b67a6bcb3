"""Every operation of a save fails once, in every way: earlier checkpoints are whole, training goes on, the next save works.

The disk's operations are numbered; each number is tried with each fault. The counts are printed (``pytest -s``) and stand in
``docs/reliability.md``.
"""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from layerferry.checkpoint.files import Files
from layerferry.checkpoint.folders import (
    PARTIAL,
    Latest,
    candidates,
    clear_leftovers,
    open_checkpoint,
    put_back,
    read_latest,
    write_latest,
)
from layerferry.checkpoint.manifest import Manifest
from layerferry.checkpoint.save import Saver
from layerferry.engine.engine import Engine
from tests.checkpoint.faults import BreakingFiles, Killed, QuickFiles
from tests.checkpoint.tiny import RUN, engine_of, model_of, save, train

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}
NEXT, LINE = "cafecafecafecafe", ((RUN, 1),)
BEFORE, AFTER = ("checkpoint-1", RUN), ("checkpoint-2", NEXT)
SMALL = {"run.json": b"{}", "config.json": b'{"a": 1}'}


@pytest.fixture(scope="module")
def engine() -> Engine:
    built = engine_of(model_of(num_hidden_layers=1, vocab_size=32, hidden_size=8, intermediate_size=8))
    return built


@pytest.fixture(scope="module")
def earlier(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder in which ``RUN`` has written 1 and 2, and ``NEXT`` goes on from 1: 2 is left behind."""
    folder = tmp_path_factory.mktemp("earlier")
    save(engine, folder, 1)
    save(engine, folder, 2)
    write_latest(Files(), folder, Latest(run=NEXT, line=LINE, checkpoint="checkpoint-1"))
    return folder


def attempt(engine: Engine, folder: Path, files: Files) -> str | None:
    """``NEXT`` saves its checkpoint-2 with ``keep=1``, and step 3 proves it; "killed", the fault that was reported, or None."""
    saver = Saver(engine, folder, run=NEXT, line=LINE, keep=1, files=files)
    try:
        saver.start(2, SMALL)
        saver.prove(3)
        outcome = saver.take_outcome(wait=True)
        assert outcome is not None
        return outcome.fault or outcome.note
    except Killed:
        return "killed"
    finally:
        saver.close()


def taken_up(folder: Path) -> tuple[str, str]:
    """Name and run of what comes next."""
    newest = candidates(folder)[0]
    return newest.name, Manifest.read(newest).run


def assert_whole(folder: Path, pool: ThreadPoolExecutor) -> Manifest:
    manifest = open_checkpoint(folder)
    manifest.check(folder, pool)
    return manifest


def num_operations(engine: Engine, earlier: Path, work: Path) -> int:
    folder = work / "count"
    shutil.copytree(earlier, folder)
    files = BreakingFiles(-1, "kill")
    assert attempt(engine, folder, files) is None
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2", "latest"]
    return files.count


@pytest.mark.parametrize(("name", "lasting"), [("ENOSPC", False), ("EIO", True)])
def test_an_error_at_every_operation(engine: Engine, earlier: Path, tmp_path: Path, name: str, lasting: bool) -> None:
    fail_everywhere(engine, earlier, tmp_path, name, lasting)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "lasting"), [("ENOSPC", True), ("EIO", False), ("EROFS", False), ("EROFS", True)])
def test_more_errors_at_every_operation(engine: Engine, earlier: Path, tmp_path: Path, name: str, lasting: bool) -> None:
    fail_everywhere(engine, earlier, tmp_path, name, lasting)


def fail_everywhere(engine: Engine, earlier: Path, tmp_path: Path, name: str, lasting: bool) -> None:
    total = num_operations(engine, earlier, tmp_path)
    seen: Counter[str] = Counter()
    with ThreadPoolExecutor(2) as pool:
        for at in range(total):
            folder = tmp_path / str(at)
            shutil.copytree(earlier, folder)
            files = BreakingFiles(at, ERRORS[name], lasting=lasting)
            fault = attempt(engine, folder, files)
            assert_whole(candidates(folder)[0], pool)
            if fault is not None:
                seen[files.names[at]] += 1
            assert taken_up(folder) in (BEFORE, AFTER)
            assert attempt(engine, folder, QuickFiles()) is None, "the next save, on a disk that is well again"
            assert [path.name for path in candidates(folder)] == ["checkpoint-2"] and taken_up(folder) == AFTER
            assert_whole(folder / "checkpoint-2", pool)
            assert not [path for path in folder.iterdir() if path.name.startswith(PARTIAL)]
            shutil.rmtree(folder)
    assert set(seen) >= {"make_folder", "create", "write", "sync", "rename", "sync_folder", "remove"}
    print(f"{name}{' from there on' if lasting else ''}: {sum(seen.values())} of {total} operations failed once: {dict(seen)}")


@pytest.mark.parametrize("kind", ["kill", "torn", "cut"])
def test_a_kill_at_every_operation(engine: Engine, earlier: Path, tmp_path: Path, kind: str) -> None:
    total = num_operations(engine, earlier, tmp_path)
    left: Counter[str] = Counter()
    windows = 0
    with ThreadPoolExecutor(2) as pool:
        for at in range(total):
            folder = tmp_path / str(at)
            shutil.copytree(earlier, folder)
            assert attempt(engine, folder, BreakingFiles(at, kind)) == "killed"
            clear_leftovers(Files(), folder)
            for path in candidates(folder):
                assert_whole(path, pool)
            found, latest = taken_up(folder), read_latest(folder)
            assert found in (BEFORE, AFTER), f"operation {at}: nothing whole is left"
            assert latest is not None and latest.run == NEXT
            windows += found == AFTER and latest.checkpoint == "checkpoint-1"
            left[found[0]] += 1
            shutil.rmtree(folder)
    assert left["checkpoint-1"] and left["checkpoint-2"] and windows, "killed before the marker has moved, too"
    print(f"{kind}: {total} operations, newest whole afterwards: {dict(left)}, {windows} of them unknown to the marker")


def test_a_kill_while_a_checkpoint_replaces_the_one_it_comes_from(engine: Engine, tmp_path: Path) -> None:
    """A run that has skipped every step since checkpoint-2 saves it once more: at no moment is neither of the two there."""
    save(engine, tmp_path, 2)
    counting, windows = BreakingFiles(-1, "kill"), 0
    for at in (None, *range(200)):
        folder = tmp_path / f"at-{at}"
        folder.mkdir()
        shutil.copytree(tmp_path / "checkpoint-2", folder / "checkpoint-2")
        write_latest(Files(), folder, Latest(run=NEXT, line=((RUN, 2),), checkpoint="checkpoint-2"))
        files = counting if at is None else BreakingFiles(at, "kill")
        saver = Saver(engine, folder, run=NEXT, line=((RUN, 2),), keep=1, files=files)
        with suppress(Killed):
            saver.start(2, SMALL)
            saver.take_outcome(wait=True)
        saver.close()
        assert files.dead == (at is not None and at < counting.count)
        moved = put_back(Files(), folder)
        windows += len(moved)
        clear_leftovers(Files(), folder)
        with ThreadPoolExecutor(2) as pool:
            assert_whole(folder / "checkpoint-2", pool)
        assert taken_up(folder)[0] == "checkpoint-2"
        shutil.rmtree(folder)
        if at == counting.count:
            break
    assert windows == 1, "between the two renames"


def test_training_goes_on_after_a_fault(tmp_path: Path) -> None:
    """No unit stays held, whatever fails: two more steps run, and their bits are those of a run that never saved."""
    model = model_of()
    plain = engine_of(model)
    expected = train(plain, range(4))
    engine = engine_of(model)
    found = train(engine, range(2))
    for at in (0, 3, 13, 23):
        files = BreakingFiles(at, errno.ENOSPC)
        saver = Saver(engine, tmp_path, run=RUN, files=files)
        saver.start(2, {})
        outcome = saver.take_outcome(wait=True)
        assert outcome is not None and (outcome.fault is None) == (files.names[at] in ("free_bytes", "close"))
        saver.close()
    assert found + train(engine, range(2, 4)) == expected
    engine.close()


def test_no_room(engine: Engine, tmp_path: Path) -> None:
    class Small(Files):
        def free_bytes(self, path: Path) -> int:
            return 1000

    fault = attempt(engine, tmp_path, Small())
    assert fault is not None and "KiB, 1000 bytes are free" in fault and "Free space" in fault
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("change", "word"), [("vanished", "vanished"), ("a file", "Not a directory")])
def test_the_output_folder_goes_away(engine: Engine, tmp_path: Path, change: str, word: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    saver = Saver(engine, folder, run=RUN)
    folder.rmdir()
    if change == "a file":
        folder.write_text("")
    saver.start(1, {})
    outcome = saver.take_outcome(wait=True)
    saver.close()
    assert outcome is not None and outcome.fault is not None and word in outcome.fault
