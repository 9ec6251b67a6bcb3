"""Kill a run at random moments, resume it, and compare it with the run that was left alone: losses and weights, bit for bit.

    python benchmarks/kill_resume.py --work /disk/with/40GB --seconds 280

trains a model of 1.03e9 random parameters twice under one fixed plan with ``full_determinism``: once undisturbed and, beside it,
once with ``kill -9`` at ``--kills`` random moments. None comes before the first whole checkpoint. Kills take turns: some time
after a new checkpoint is whole, and while one is being written (the restart then takes the one before). Every restart
must take up the newest whole checkpoint. After the last kill the run saves no more and goes to its end.

The parent has imported everything and touched no device, so a start is a fork. Progress is in ``--work``: where ``--seconds``
are over too early, the same command goes on. Prints one JSON object: kills, the step that each restart took up, the rates
of checkpoints, and the largest difference of a logged loss, which must be 0. Exit status: 0 equal, 1 not, 2 not done yet.
Tried at tiny size on a CPU by ``tests/test_benchmarks.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shapes import config_of

TOKENIZER = Path(__file__).parents[1] / "tests" / "goldens" / "data" / "tokenizer"
WORDS = ("ferry", "river", "bank", "rope", "load", "north", "tide", "cold", "oar", "mist", "stone", "wind", "keel", "sail")
WHOLE, KILLED = "whole", "killed"
KINDS = ("after a checkpoint", "while saving")


class NotDone(SystemExit):
    """The time is over; what has been done is kept."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-1.5b", help="a shape of shapes.py")
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--vocab", type=int, default=0, help="0: the model's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("kill_resume"), help="folder for everything")
    parser.add_argument("--fresh", action="store_true", help="begin anew although --work has progress")
    parser.add_argument("--seconds", type=float, default=280.0, help="stop by then, done or not")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="rows a step")
    parser.add_argument("--micro-batch-rows", type=int, default=2)
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--home", type=int, default=2, help="layers whose planes live on the device")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def prepare(args: argparse.Namespace) -> None:
    """A model folder without weights, the tests' tokenizer, and rows of random words, longer than will be used."""
    shutil.rmtree(args.work, ignore_errors=True)
    model = args.work / "model"
    model.mkdir(parents=True)
    config_of(args.model, layers=args.layers, vocab=args.vocab or None).save_pretrained(model)
    for path in TOKENIZER.iterdir():
        shutil.copy(path, model)
    chance = random.Random(args.seed)
    with open(args.work / "rows.jsonl", "w", encoding="utf-8") as file:
        for _ in range(max(args.rows * args.steps // 2, 1)):  # two epochs
            text = " ".join(WORDS[min(int(chance.expovariate(0.3)), len(WORDS) - 1)] for _ in range(args.row_tokens))
            file.write(json.dumps({"text": text}) + "\n")


# ---------------------------------------------------------------- in a child


def train_one(args: argparse.Namespace, name: str, *, saves: bool) -> None:
    """One run into ``--work/<name>``: deterministic kernels, and a plan that no measurement can change."""
    import logging

    from layerferry import api
    from layerferry.config import Config, DataConfig, EngineConfig, ModelConfig, OptimConfig, TrainConfig
    from layerferry.plan import Plan
    from layerferry.trainer import train

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plan = Plan(
        on_device=tuple(range(1, 1 + args.home)),
        num_slots=3,
        chunk_tokens=4096,
        optimizer_threads=max(1, len(os.sched_getaffinity(0)) - 2),
        micro_batch_rows=args.micro_batch_rows,
        row_tokens=args.row_tokens,
        rows_per_step=args.rows,
    )
    api.load = partial(api.load, plan=plan)
    train(
        Config(
            model=ModelConfig(model_name_or_path=str(args.work / "model"), train_from_scratch=True),
            data=DataConfig(
                dataset=(str(args.work / "rows.jsonl"),), cutoff_len=args.row_tokens, template="empty", packing=False
            ),
            optim=OptimConfig(learning_rate=3e-4, lr_scheduler_type="cosine", warmup_ratio=0.1),
            train=TrainConfig(
                stage="pt",
                output_dir=str(args.work / name),
                per_device_train_batch_size=args.rows,
                max_steps=args.steps,
                logging_steps=1,
                save_strategy="steps" if saves else "no",
                save_steps=args.save_steps,
                save_total_limit=1,
                full_determinism=True,
                disable_tqdm=True,
            ),
            engine=EngineConfig(device=args.device),
        )
    )


# ---------------------------------------------------------------- in the parent


@dataclass
class Child:
    """A training process and its log."""

    pid: int
    log: Path
    status: int | None = None

    @classmethod
    def start(cls, args: argparse.Namespace, name: str, *, saves: bool = True) -> Child:
        log = args.work / f"{name}.log"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return cls(pid, log)
        code = 1
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            train_one(args, name, saves=saves)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def has_ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def kill(self) -> None:
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.status = -signal.SIGKILL


class Course:
    """The course of one such test: what has been done, and what time is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.monotonic()
        self._file = args.work / "progress.json"
        self.settings = {key: str(value) for key, value in vars(args).items() if key not in ("work", "fresh", "seconds")}
        known = json.loads(self._file.read_text()) if self._file.is_file() and not args.fresh else {}
        if known.get("settings") != self.settings:
            prepare(args)
            known = {}
        self.kills: list[str] = known.get("kills", [])
        self.taken_up: list[int] = known.get("taken_up", [])
        self.chance = random.Random(args.seed + len(self.kills))

    def keep(self) -> None:
        self._file.write_text(json.dumps({"settings": self.settings, "kills": self.kills, "taken_up": self.taken_up}))

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s  {text}", file=sys.stderr, flush=True)

    @property
    def output(self) -> Path:
        return Path(self.args.work) / KILLED

    def left_s(self) -> float:
        return float(self.args.seconds) - (time.monotonic() - self.begin)

    def wait(self, child: Child, is_so: Callable[[], bool], what: str) -> None:
        """Until ``is_so``; the child must live, and time be left."""
        while not is_so():
            if child.has_ended():
                raise SystemExit(f"the run ended ({child.status}) before {what}: more --steps? {child.log}")
            if self.left_s() <= 0:
                child.kill()
                self.keep()
                raise NotDone(f"--seconds are over, waiting for {what}: the same command goes on from here")
            time.sleep(0.02)

    def newest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        from layerferry.checkpoint.folders import candidates, step_of

        found = candidates(self.output)
        return step_of(found[0]) if found else None

    def is_saving(self) -> bool:
        return any(self.output.glob(".partial-checkpoint-*"))

    # ------------------------------------------------------------ what is done

    def kill_once(self) -> None:
        """Start, take up the newest checkpoint, and kill at a random moment of the next kind."""
        known, kind = self.newest(), KINDS[len(self.kills) % len(KINDS)]
        child = Child.start(self.args, KILLED)
        offset = len(child.text())

        def so_far() -> str:
            return child.text()[offset:]

        self.wait(child, lambda: "\nstep " in so_far(), "the first step")
        self._check_start(so_far(), known)
        if kind == KINDS[0]:
            self.wait(child, lambda: self.newest() != known, "a new checkpoint")
        else:
            self.wait(child, self.is_saving, "a save")
        saves_s = [float(seconds) for seconds in re.findall(r"\nsaved .* in ([\d.]+) s,", child.text())]
        moment_s = self.chance.uniform(0.0, 0.8 * (saves_s[-1] if saves_s else 1.0))
        deadline = time.monotonic() + moment_s
        self.wait(child, lambda: time.monotonic() >= deadline, "the kill")
        saving, step = self.is_saving(), re.findall(r"\nstep (\d+)/", so_far())[-1]
        child.kill()
        text = f"{kind}, {moment_s:.1f} s later: at step {step}{', saving' if saving else ''}; whole: {self.newest()}"
        self.kills.append(text)
        self.keep()
        self.say(f"kill {len(self.kills)}: {text}")

    def go_to_the_end(self) -> None:
        known = self.newest()
        child = Child.start(self.args, KILLED, saves=False)
        offset = len(child.text())
        self.wait(child, lambda: "\nstep " in child.text()[offset:], "the first step")
        self._check_start(child.text()[offset:], known)
        self.say(f"resumed at {known}, going to the end")
        self.end_of(child)

    def end_of(self, child: Child) -> None:
        while not child.has_ended():
            if self.left_s() <= 0:
                child.kill()
                self.keep()
                raise NotDone("--seconds are over before the end: the same command goes on from here")
            time.sleep(0.05)
        if child.status != 0:
            raise SystemExit(f"the run failed: {child.log}")

    def _check_start(self, text: str, known: int | None) -> None:
        found = re.search(r"resuming \S+: step (\d+)", text)
        if known is None and found is None:
            return
        if found is None or int(found[1]) != known:
            raise SystemExit(f"checkpoint-{known} was the newest whole one, the restart took up {found and found[1]}")
        self.taken_up.append(int(found[1]))


def losses(folder: Path) -> list[float]:
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in entries if "loss" in entry]


def weights_sum(folder: Path) -> int:
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            while piece := file.read(1 << 24):
                total = zlib.crc32(piece, total)
    return total


def is_finished(folder: Path) -> bool:
    return (folder / "trainer_state.json").is_file()


def row(course: Course) -> dict[str, Any]:
    args, text = course.args, (course.args.work / f"{KILLED}.log").read_text(errors="replace")
    one, other = losses(args.work / WHOLE), losses(args.work / KILLED)
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return {
        "benchmark": "kill_resume",
        "model": f"{args.model}, {args.layers} layers",
        "steps": args.steps,
        "tokens_per_step": args.rows * args.row_tokens,
        "seconds": round(time.monotonic() - course.begin, 1),
        "kills": course.kills,
        "resumed_from": course.taken_up,
        "checkpoints": re.findall(r"\nsaved \S+ \((.*)\)", text),
        "first_loss": one[0],
        "last_loss": one[-1],
        "largest_difference": max(differences),
        "same_weights": weights_sum(args.work / WHOLE) == weights_sum(args.work / KILLED),
    }


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    import layerferry.trainer.run  # noqa: F401  # before the first fork, as are the model's classes

    course = Course(args)
    whole = None
    try:
        if not is_finished(args.work / WHOLE):
            shutil.rmtree(args.work / WHOLE, ignore_errors=True)
            whole = Child.start(args, WHOLE, saves=False)
        while len(course.kills) < args.kills:
            course.kill_once()
        if not is_finished(course.output):
            course.go_to_the_end()
        if whole is not None:
            course.end_of(whole)
    except NotDone as over:
        course.say(str(over))
        return 2
    finally:
        if whole is not None:
            whole.kill()
    found = row(course)
    print(json.dumps(found), flush=True)
    equal = found["same_weights"] and found["largest_difference"] == 0
    return 0 if equal and len(found["resumed_from"]) >= args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
