"""A random life of a run: trained, stopped, killed inside a save, its disk filled, its files damaged, its plan changed.

The model is the run that was left alone. Every checkpoint that is whole must equal, byte for byte, the one that this run had
at that step; damage must be found before a step, and the offer that the message makes must be taken up; and
whatever came before, the run that is at last left alone must end in the same bytes. Rules have no preconditions: several threads
write, so what a kill leaves depends on their turns, and a rule without an object does nothing. Short here; long in ``make soak``.
"""

from __future__ import annotations

import errno
import re
import shutil
import signal
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from layerferry.checkpoint.folders import PARTIAL, candidates, checkpoints
from layerferry.checkpoint.manifest import Manifest
from layerferry.errors import CheckpointError, ConfigError, Interrupted
from layerferry.trainer import loop, run, train
from layerferry.trainer.interrupts import Interrupts
from tests.checkpoint.faults import BreakingFiles, Killed, QuickFiles
from tests.checkpoint.test_damage import KINDS, damage
from tests.reliability.runs import ENGINES, assert_same_folder, make_config, prepare, saver_on

STEPS = 6
RUN: dict[str, Any] = {"max_steps": STEPS, "save_steps": 1, "logging_steps": 2}

counts: Counter[str] = Counter()


class SignalAfter(Interrupts):
    """SIGTERM, seen after so many steps."""

    polls = 0

    @property  # type: ignore[override]
    def received(self) -> int | None:
        type(self).polls -= 1
        return signal.SIGTERM if type(self).polls < 0 else None

    @received.setter
    def received(self, value: int | None) -> None: ...


def is_whole(folder: Path, pool: ThreadPoolExecutor) -> bool:
    try:
        Manifest.read(folder).check(folder, pool)
    except CheckpointError:
        return False
    return True


class Life(RuleBasedStateMachine):
    base: Path
    whole: Path

    def __init__(self) -> None:
        super().__init__()
        self.work = Path(tempfile.mkdtemp(prefix="life-", dir=self.base))
        self.output = self.work / "whole"
        self.damaged: set[str] = set()

    def teardown(self) -> None:
        try:
            self._train(QuickFiles(), "resident", keep=None)
            assert_same_folder(self.output, self.whole)
            counts["lives"] += 1
        finally:
            shutil.rmtree(self.work)

    def _train(
        self, files: QuickFiles, engine: str, keep: int | None, *, after: int | None = None, start: Path | None = None
    ) -> str:
        """Run until it ends, is stopped or killed; takes up every offer that an error makes."""
        wish: dict[str, Any] = {} if start is None else {"resume_from_checkpoint": str(start)}
        SignalAfter.polls = 10**6 if after is None else after
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "Saver", saver_on(files))
            patch.setattr(loop, "Interrupts", SignalAfter)
            for _ in range(2 * STEPS):
                try:
                    train(make_config(self.base, self.output, engine=engine, save_total_limit=keep, **RUN, **wish))
                    return "ended"
                except Interrupted:
                    return "stopped"
                except Killed:
                    return "killed"
                except ConfigError as error:  # weights without a checkpoint, or checkpoints of the run before only
                    assert "set overwrite_output_dir: true" in str(error) or "or overwrite_output_dir: true" in str(error)
                    wish = {"overwrite_output_dir": True}
                    counts["started anew"] += 1
                except CheckpointError as error:
                    counts["faults found before a step"] += 1
                    offer = re.search(r"set resume_from_checkpoint: (\S+)$", str(error))
                    wish = {"resume_from_checkpoint": offer[1]} if offer else {"overwrite_output_dir": True}
                    counts["offers taken" if offer else "started anew"] += 1
        raise AssertionError("no offer led on")

    @rule(engine=st.sampled_from([*ENGINES]), after=st.integers(0, 3), keep=st.sampled_from([None, 1, 2]))
    def stop(self, engine: str, after: int, keep: int | None) -> None:
        counts[self._train(QuickFiles(), engine, keep, after=after)] += 1

    @rule(which=st.integers(0, 5), after=st.integers(0, 2), keep=st.sampled_from([None, 1]))
    def go_back(self, which: int, after: int, keep: int | None) -> None:
        """To a checkpoint that is whole, whatever newer ones there are: what is written then is what comes next, and is kept."""
        with ThreadPoolExecutor(1) as pool:
            folders = [path for path in checkpoints(self.output) if is_whole(path, pool)]
        if folders:
            start = folders[which % len(folders)]
            step = int(start.name.removeprefix("checkpoint-"))
            counts[self._train(QuickFiles(), "streamed", keep, after=after, start=start)] += 1
            newest = min(step + after + 1, STEPS)
            own = [path.name for path in candidates(self.output)]
            assert own[0] == f"checkpoint-{newest}", f"{own} behind {start.name} and {after} steps"
            assert keep is None or step == STEPS or own == [f"checkpoint-{newest}", f"checkpoint-{newest - 1}"], (
                "the newest, not proven yet, and one"
            )
            counts["went back"] += 1

    @rule(
        engine=st.sampled_from([*ENGINES]),
        at=st.integers(0, 330),
        kind=st.sampled_from(["kill", "torn", "cut"]),
        keep=st.sampled_from([None, 1, 2]),
    )
    def kill(self, engine: str, at: int, kind: str, keep: int | None) -> None:
        counts[self._train(BreakingFiles(at, kind), engine, keep)] += 1

    @rule(at=st.integers(0, 250), code=st.sampled_from([errno.ENOSPC, errno.EIO]), lasting=st.booleans(), after=st.integers(1, 3))
    def break_the_disk(self, at: int, code: int, lasting: bool, after: int) -> None:
        counts["disks broken"] += 1
        self._train(BreakingFiles(at, code, lasting=lasting), "streamed", None, after=after)

    @rule(which=st.sampled_from([0, 0, 0, 1, 2]), file=st.integers(0, 30), kind=st.sampled_from(KINDS))
    def corrupt(self, which: int, file: int, kind: str) -> None:
        """Mostly the newest one: the others are only looked at when that one is no good."""
        folders = checkpoints(self.output)
        files = sorted(folders[which % len(folders)].iterdir()) if folders else []
        if files:
            damage(files[file % len(files)], kind)
            counts["files damaged"] += 1

    @rule(which=st.integers(0, 5))
    def lose(self, which: int) -> None:
        folders = checkpoints(self.output)
        if len(folders) > 2:
            shutil.rmtree(folders[which % len(folders)])
            counts["checkpoints lost"] += 1

    @invariant()
    def whole_checkpoints_are_right(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            for folder in checkpoints(self.output):
                if is_whole(folder, pool):
                    assert_same_folder(folder, self.whole / folder.name)
                    counts["checkpoints compared"] += 1


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = prepare(tmp_path_factory.mktemp("base"))
    train(make_config(base, base / "whole", **RUN))
    return base


def live(base: Path, *, lives: int, rules: int) -> None:
    Life.base, Life.whole = base, base / "whole"
    counts.clear()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Life,
        settings=settings(
            max_examples=lives,
            stateful_step_count=rules,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert not [path for path in base.iterdir() if path.name.startswith(PARTIAL)]
    print(dict(counts))


def test_lives(base: Path) -> None:
    live(base, lives=3, rules=5)
    assert counts["lives"] >= 3 and counts["checkpoints compared"] > 10


def test_a_life_with_branches(base: Path) -> None:
    """Back beside a damaged newest one, and back once more: an order that chance seldom finds in three lives."""
    Life.base, Life.whole = base, base / "whole"
    life = Life()
    life.stop("streamed", 3, None)  # 1 2 3 4
    life.corrupt(0, 0, "flipped inside")
    life.go_back(1, 0, 1)  # from 2: 3 anew; 4 stays behind
    life.go_back(0, 1, None)  # from 3: 4 anew, and 5
    life.whole_checkpoints_are_right()
    life.go_back(2, 0, 1)  # from 3 once more
    life.teardown()


def test_a_life_with_a_kill_and_a_broken_disk(base: Path) -> None:
    """Three lives by chance may have neither."""
    Life.base, Life.whole = base, base / "whole"
    counts.clear()
    life = Life()
    life.kill("disk", 110, "torn", 1)
    life.whole_checkpoints_are_right()
    life.break_the_disk(40, errno.ENOSPC, True, 1)
    life.kill("threads", 50, "cut", 2)
    life.whole_checkpoints_are_right()
    life.teardown()
    assert (counts["killed"], counts["disks broken"], counts["lives"]) == (2, 1, 1)
    assert counts["checkpoints compared"]


@pytest.mark.soak
def test_many_lives(base: Path) -> None:
    live(base, lives=60, rules=12)
    assert min(counts[name] for name in ("killed", "stopped", "disks broken", "files damaged", "offers taken", "went back")) >= 5
