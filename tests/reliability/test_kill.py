"""``kill -9`` at random moments, signals, and a second run on the same folder: real processes.

After every kill the newest checkpoint is whole and equals that of the run that was left alone; in the end the two folders have
the same bytes. Every other process has optimizer state @disk. Three kills here, sixty in ``make soak``.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from layerferry.checkpoint.folders import candidates
from layerferry.checkpoint.manifest import Manifest
from tests.reliability.processes import context, random_moment, start, wait_for
from tests.reliability.runs import assert_same_folder, contents, prepare

SETTINGS: dict[str, Any] = {"max_steps": 36, "save_steps": 3, "logging_steps": 5, "save_total_limit": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def whole(base: Path) -> tuple[Path, float]:
    """The run that was left alone, and the seconds that it took."""
    output = base / "whole"
    warm = context().Process(target=int)  # the fork server's own imports are no part of a run
    warm.start()
    warm.join()
    begin = time.monotonic()
    process = start(base, output, {**SETTINGS, "save_total_limit": None})
    process.join()
    assert process.exitcode == 0, (base / "whole.log").read_text()
    return output, time.monotonic() - begin


def kill_until_done(base: Path, whole: tuple[Path, float], *, kills: int, seed: int) -> None:
    reference, seconds = whole
    output = base / f"killed-{seed}"
    chance = random.Random(seed)
    left: Counter[str] = Counter()
    killed = 0
    while killed < kills:
        process = start(base, output, {**SETTINGS, "engine": ("streamed", "disk")[killed % 2]})
        process.join(random_moment(chance, seconds))
        if process.exitcode == 0:  # it was faster than the kill: compare, and begin anew
            assert_same_folder(output, reference)
            shutil.rmtree(output)
            left["ended before"] += 1
            continue
        assert process.exitcode is None, (base / f"{output.name}.log").read_text()
        process.kill()
        process.join()
        killed += 1
        found = candidates(output)
        left[found[0].name if found else "none yet"] += 1
        with ThreadPoolExecutor(1) as pool:
            for folder in found:
                Manifest.read(folder).check(folder, pool)
                assert_same_folder(folder, reference / folder.name)
    process = start(base, output, SETTINGS)
    process.join()
    assert process.exitcode == 0, (base / f"{output.name}.log").read_text()
    assert_same_folder(output, reference)
    assert [path.name for path in candidates(output)] == ["checkpoint-36", "checkpoint-33"]
    print(f"{kills} kills, newest checkpoint behind each: {dict(left)}")


def test_killed_at_random_moments(base: Path, whole: tuple[Path, float]) -> None:
    kill_until_done(base, whole, kills=3, seed=1)


@pytest.mark.soak
def test_killed_at_many_random_moments(base: Path, whole: tuple[Path, float]) -> None:
    for seed in range(2, 7):
        kill_until_done(base, whole, kills=12, seed=seed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_the_same_command_goes_on(base: Path, whole: tuple[Path, float], number: int, code: int) -> None:
    output = base / f"signalled-{code}"
    log = base / f"{output.name}.log"
    process = start(base, output, SETTINGS)
    wait_for(log, "step 10/36")
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == code, log.read_text()
    keys = "without overwrite_output_dir and resume_from_checkpoint"
    assert f"is saved: the same command goes on from there ({keys})" in log.read_text()
    newest = candidates(output)[0]
    assert newest.name not in {f"checkpoint-{step}" for step in range(9)}
    process = start(base, output, SETTINGS)
    process.join(60)
    assert process.exitcode == 0 and f"resuming {newest}" in log.read_text()
    found, expected = contents(output), contents(whole[0])
    assert found == expected


def test_the_second_signal_ends_at_once(base: Path) -> None:
    """Although the save that the first one has begun hangs for ever."""
    output = base / "twice"
    log = base / "twice.log"
    process = start(base, output, {**SETTINGS, "save_strategy": "no"}, "stuck")
    wait_for(log, "step 5/36")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    wait_for(log, "once more ends at once")
    time.sleep(0.2)
    assert process.exitcode is None
    os.kill(process.pid, signal.SIGTERM)
    process.join(10)
    assert process.exitcode == -signal.SIGTERM  # a shell says 143
    assert candidates(output) == []


def test_two_runs_on_one_folder(base: Path) -> None:
    output = base / "shared"
    first = start(base, output, {**SETTINGS, "max_steps": 100_000, "save_strategy": "no"})
    try:
        wait_for(base / "shared.log", "step 5/")
        second = start(base, output, SETTINGS)
        second.join(60)
        assert second.exitcode == 2
        assert f"is in use by process {first.pid} on" in (base / "shared.log").read_text()
    finally:
        first.kill()
        first.join()
    third = start(base, output, {**SETTINGS, "max_steps": 2})
    third.join(60)
    assert third.exitcode == 0
