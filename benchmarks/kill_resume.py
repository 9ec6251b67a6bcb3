"""Kill a run at random moments, resume it, and compare it with the run that was left alone: losses and weights, bit for bit.

    python benchmarks/kill_resume.py --model qwen2.5-1.5b --layers 18 --work /disk/with/40GB

trains a model of 1.1e9 random parameters twice under one fixed plan, with deterministic kernels: once undisturbed, once with
``kill -9`` at ``--kills`` random moments (the first while it loads, the others while it trains and saves in the background).
Prints one JSON object: bytes and rate of the checkpoints, kills and the step that each
resumed from, and the largest difference of a logged loss, which must be 0. Ends with 1 where anything differs.
Tried at tiny size on a CPU: ``--model tiny --layers 4 --vocab 1500 --device cpu --row-tokens 64 --rows 4 --span 1``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

from shapes import config_of

TOKENIZER = Path(__file__).parents[1] / "tests" / "goldens" / "data" / "tokenizer"
WORDS = ("ferry", "river", "bank", "rope", "load", "north", "tide", "cold", "oar", "mist", "stone", "wind", "keel", "sail")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-1.5b", help="a shape of shapes.py")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--vocab", type=int, default=0, help="0: the model's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("kill_resume"), help="folder for everything; emptied first")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--save-steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16, help="rows a step")
    parser.add_argument("--micro-batch-rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--home", type=int, default=2, help="layers whose planes live on the device")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--span", type=float, default=20.0, help="a kill comes within so many seconds behind the first step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
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
        for _ in range(args.rows * args.steps // 2):  # two epochs
            text = " ".join(WORDS[min(int(chance.expovariate(0.3)), len(WORDS) - 1)] for _ in range(args.row_tokens))
            file.write(json.dumps({"text": text}) + "\n")


def child(args: argparse.Namespace) -> None:
    """One run into ``--work/<name>``: deterministic kernels, and a plan that no measurement can change."""
    import logging

    import torch

    from layerferry import api
    from layerferry.config import Config, DataConfig, EngineConfig, ModelConfig, OptimConfig, TrainConfig
    from layerferry.plan import Plan
    from layerferry.trainer import run, train

    torch.use_deterministic_algorithms(True)  # strict: cuDNN attention keeps its fast algorithm under warn_only
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
    api.load = partial(api.load, plan=plan)  # type: ignore[assignment]
    run.render = lambda plan, question: "the plan is fixed"  # type: ignore[assignment]
    saves = args.child == "killed"
    train(
        Config(
            model=ModelConfig(model_name_or_path=str(args.work / "model"), train_from_scratch=True),
            data=DataConfig(
                dataset=(str(args.work / "rows.jsonl"),), cutoff_len=args.row_tokens, template="empty", packing=False
            ),
            optim=OptimConfig(learning_rate=3e-4, lr_scheduler_type="cosine", warmup_ratio=0.1),
            train=TrainConfig(
                stage="pt",
                output_dir=str(args.work / args.child),
                per_device_train_batch_size=args.rows,
                max_steps=args.steps,
                logging_steps=1,
                save_strategy="steps" if saves else "no",
                save_steps=args.save_steps,
                save_total_limit=1,
                disable_tqdm=True,
            ),
            engine=EngineConfig(device=args.device),
        )
    )


def start(args: argparse.Namespace, name: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
    with open(log, "ab") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)


def wait_for_steps(process: subprocess.Popen[bytes], log: Path, known: int) -> bool:
    """Until the log shows a step more than ``known``; False where the process has ended before."""
    while log.read_text(errors="replace").count("\nstep ") <= known:
        if process.poll() is not None:
            return False
        time.sleep(0.02)
    return True


def killed_run(args: argparse.Namespace, startup_s: float) -> list[str]:
    """The run that is killed; what each kill found it doing."""
    log, chance, found = args.work / "killed.log", random.Random(args.seed), []
    log.touch()
    for number in range(args.kills):
        known = log.read_text(errors="replace").count("\nstep ")
        process = start(args, "killed", log)
        if number == 0:
            time.sleep(chance.uniform(0.3, 1.0) * startup_s)
        elif wait_for_steps(process, log, known):
            time.sleep(chance.uniform(0, args.span))
        if process.poll() is not None:
            raise SystemExit(f"the run ended before kill {number + 1}: more --steps or a smaller --span; see {log}")
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps = re.findall(r"\nstep (\d+)/", log.read_text(errors="replace"))
        saving = list((args.work / "killed").glob(".partial-*"))
        found.append(f"step {steps[-1] if steps else 0}{', while saving' if saving else ''}")
        print(f"kill {number + 1}: {found[-1]}", file=sys.stderr, flush=True)
    if start(args, "killed", log).wait() != 0:
        raise SystemExit(f"the resumed run failed: {log}")
    return found


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


def main() -> int:
    args = parser().parse_args()
    if args.child:
        child(args)
        return 0
    prepare(args)
    log = args.work / "whole.log"
    log.touch()
    begin = time.monotonic()
    process = start(args, "whole", log)
    wait_for_steps(process, log, 0)
    startup_s = time.monotonic() - begin
    if process.wait() != 0:
        raise SystemExit(f"the undisturbed run failed: {log}")
    whole_s = time.monotonic() - begin
    kills = killed_run(args, startup_s)
    text = (args.work / "killed.log").read_text(errors="replace")
    one, other = losses(args.work / "whole"), losses(args.work / "killed")
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    row: dict[str, Any] = {
        "benchmark": "kill_resume",
        "model": f"{args.model}, {args.layers} layers",
        "steps": args.steps,
        "tokens_per_step": args.rows * args.row_tokens,
        "whole_run_s": round(whole_s, 1),
        "startup_s": round(startup_s, 1),
        "killed_run_s": round(time.monotonic() - begin - whole_s, 1),
        "kills": kills,
        "resumed_from": [int(step) for step in re.findall(r"resuming \S+: step (\d+)", text)],
        "checkpoints": re.findall(r"\(([\d.]+ GB at [\d.]+ GB/s)\)", text),
        "first_loss": one[0],
        "last_loss": one[-1],
        "largest_difference": max(differences),
        "same_weights": weights_sum(args.work / "whole") == weights_sum(args.work / "killed"),
    }
    print(json.dumps(row), flush=True)
    return 0 if row["same_weights"] and row["largest_difference"] == 0 and len(one) == args.steps else 1


if __name__ == "__main__":
    sys.exit(main())
