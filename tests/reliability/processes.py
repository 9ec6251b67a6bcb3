"""Training runs in processes of their own, to be killed. A fork server has done the heavy imports, so one starts at once."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.reliability.runs import make_config


def context() -> Any:
    """The fork server's context. One thread a process: a fork must not find others."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.reliability.preloaded"])
    return found


def train_in_process(base: Path, output: Path, log: Path, settings: dict[str, Any], disk: str | None = None) -> None:
    """What the process does: the command line's ``train``, with its exit code. ``disk`` "stuck": it takes no byte of a shard."""
    from layerferry.errors import LayerFerryError
    from layerferry.trainer import train

    stream = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
    os.dup2(stream.fileno(), 2)
    logger = logging.getLogger("layerferry")
    logger.handlers[:] = [logging.StreamHandler(stream)]
    logger.setLevel(logging.INFO)
    if disk == "stuck":
        from layerferry.checkpoint.files import Files

        def write_at(self: Files, descriptor: int, piece: memoryview, position: int) -> int:
            time.sleep(3600)
            return 0

        Files.write_at = write_at  # type: ignore[method-assign]
    try:
        train(make_config(base, output, **settings))
    except LayerFerryError as error:
        print("error:", error, file=stream)
        sys.exit(error.exit_code)


def start(base: Path, output: Path, settings: dict[str, Any], disk: str | None = None) -> BaseProcess:
    log = output.parent / f"{output.name}.log"
    process: BaseProcess = context().Process(target=train_in_process, args=(base, output, log, settings, disk), daemon=True)
    process.start()
    return process


def wait_for(path: Path, text: str, *, seconds: float = 60) -> None:
    """Until ``text`` stands in the file."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{text!r} does not come: {path.read_text() if path.exists() else 'no file'}"
        time.sleep(0.005)


def random_moment(chance: random.Random, longest_s: float) -> float:
    """Uniform, but one in three near the beginning, where a run takes up its checkpoint."""
    return chance.uniform(0, longest_s if chance.random() > 0.33 else longest_s / 4)
