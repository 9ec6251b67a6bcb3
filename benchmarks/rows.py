"""What every benchmark shares: its common options, the fields that say where a row was measured, timing, and where rows go.

A row is one JSON object on one line, printed and appended to ``--out``. ``STEP_FIELDS`` are those of a row that describes
whole training steps, whichever program ran them: ``step_row`` fills them, so that two systems can be compared field by
field. The commit is git's, or ``--commit`` where the code was copied without its history. Checked by
``tests/test_benchmarks.py``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layerferry.backends.base import Backend, Lane, Mark
from layerferry.data.batches import collate
from layerferry.data.pack import packed
from layerferry.data.samples import Row, SampleSet
from layerferry.engine.batch import IGNORE_INDEX, MicroBatch
from layerferry.plan import GIB
from layerferry.planner.machine import device_name

COMMON_FIELDS = ("machine", "torch", "commit", "date")
STEP_FIELDS = (
    *("case", "model", "layers", "row_tokens", "tokens_per_step", "step_s", "step_s_all", "model_tflops", "tokens_per_s"),
    *("device_peak_gib", "host_resident_gib", "bytes_per_param", "exposed_optimizer_s", "exposed_link_s"),
    *("h2d_gb_per_s", "d2h_gb_per_s", "predicted_step_s", "predicted_device_gib", "plan", *COMMON_FIELDS),
)


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="name of the setting; left out: made from it")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, cpu")
    parser.add_argument("--out", default="", help="append the rows to this file")
    parser.add_argument("--commit", default="", help="hash of the code; left out: git is asked")
    parser.add_argument("--resume", action="store_true", help="leave out cases that --out already has for this commit")
    return parser


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argument type: values of ``kind``, separated by commas."""

    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


# ---------------------------------------------------------------- rows


def commit_of(args: argparse.Namespace) -> str:
    if args.commit:
        return str(args.commit)
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=here
        ).stdout
    except OSError:  # no git
        found = ""
    return found.strip() or "unknown"


def common(backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    """``COMMON_FIELDS``: where, with what, which code, when."""
    return {
        "machine": f"{device_name(backend)}, {len(os.sched_getaffinity(0))} cores",
        "torch": torch.__version__,
        "commit": commit_of(args),
        "date": datetime.date.today().isoformat(),
    }


def is_done(args: argparse.Namespace, case: str) -> bool:
    """Under ``--resume``: whether ``--out`` has ``case`` of this commit and model."""
    if not (args.resume and args.out and Path(args.out).is_file()):
        return False
    known = [json.loads(line) for line in Path(args.out).read_text().splitlines() if line.strip()]
    model = getattr(args, "model", None)
    wanted = (case, commit_of(args), model)
    return any((row.get("case"), row.get("commit"), row.get("model", model)) == wanted for row in known)


def emit(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Print ``row`` and append it to ``--out``."""
    line = json.dumps(row)
    print(line, flush=True)
    if args.out:
        with open(args.out, "a") as stream:
            stream.write(line + "\n")


def significant(value: float) -> float:
    """Four digits: rates of a CPU and of an H200 share a field."""
    return float(f"{value:.4g}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- rows of whole steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Counted steps of one system. What it does not have (a link, a plan) stays at its default."""

    case: str
    model: str
    layers: int
    row_tokens: int
    tokens_per_step: int
    flops_per_step: float
    seconds: Sequence[float]  # of each counted step
    num_params: int
    peak_bytes: int  # @device
    resident_bytes: int  # @host, growth while the state was built
    plan: dict[str, Any]
    exposed_optimizer_s: Sequence[float] = (0.0,)
    exposed_link_s: Sequence[float] = (0.0,)
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    predicted_step_s: float | None = None
    predicted_device_bytes: int | None = None


def step_row(steps: Steps, own: dict[str, Any], backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    """``STEP_FIELDS``, and the program's ``own`` fields before those that say where."""
    step_s = statistics.median(steps.seconds)
    predicted = steps.predicted_device_bytes
    return {
        "case": steps.case,
        "model": steps.model,
        "layers": steps.layers,
        "row_tokens": steps.row_tokens,
        "tokens_per_step": steps.tokens_per_step,
        "step_s": round(step_s, 4),
        "step_s_all": [round(s, 4) for s in steps.seconds],
        "model_tflops": significant(steps.flops_per_step / step_s / 1e12),
        "tokens_per_s": round(steps.tokens_per_step / step_s, 1),
        "device_peak_gib": round(steps.peak_bytes / GIB, 3),
        "host_resident_gib": round(steps.resident_bytes / GIB, 3),
        "bytes_per_param": round(steps.resident_bytes / steps.num_params, 3),
        "exposed_optimizer_s": round(statistics.median(steps.exposed_optimizer_s), 4),
        "exposed_link_s": round(statistics.median(steps.exposed_link_s), 4),
        "h2d_gb_per_s": round(steps.uploaded_bytes / step_s / 1e9, 2),
        "d2h_gb_per_s": round(steps.downloaded_bytes / step_s / 1e9, 2),
        "predicted_step_s": None if steps.predicted_step_s is None else round(steps.predicted_step_s, 4),
        "predicted_device_gib": None if predicted is None else round(predicted / GIB, 3),
        **own,
        "plan": steps.plan,
        **common(backend, args),
    }


def random_batches(*, rows: int, row_tokens: int, micro_batch_rows: int, vocab_size: int) -> list[MicroBatch]:
    """Full rows of random tokens, each of them trained."""
    batches = []
    for start in range(0, rows, micro_batch_rows):
        count = min(micro_batch_rows, rows - start)
        ids = torch.randint(0, vocab_size, (count, row_tokens))
        batches.append(MicroBatch(input_ids=ids, labels=ids.clone(), lengths=torch.full((count,), row_tokens)))
    return batches


def packed_batches(*, rows: int, row_tokens: int, micro_batch_rows: int, vocab_size: int, sample_tokens: int) -> list[MicroBatch]:
    """Rows of random samples, ``sample_tokens`` long on average (exponential; 16 at least, a row at most), packed and kept apart
    as ``neat_packing`` does. The first token of a sample carries no loss."""
    drawn = torch.empty(2 * rows * row_tokens // sample_tokens + 1).exponential_(1.0 / sample_tokens)
    lengths = drawn.long().clamp(min(16, row_tokens), row_tokens).tolist()
    ids = [torch.randint(0, vocab_size, (length,)).tolist() for length in lengths]
    packs = list(packed([Row(input_ids=one, labels=[IGNORE_INDEX, *one[1:]]) for one in ids], row_tokens))
    chosen = [packs[i] for i in torch.randperm(len(packs))[:rows].tolist()]
    return collate(SampleSet(iter(chosen), isolated=True), micro_batch_rows)


# ---------------------------------------------------------------- measuring


def timed(backend: Backend, work: Callable[[], Any], *, repeats: int, warmup: int = 1, lane: Lane = Lane.COMPUTE) -> list[float]:
    """Seconds that each repeat kept ``lane`` busy, by the backend's own marks, after ``warmup`` unmeasured ones."""
    for _ in range(warmup):
        work()
    backend.synchronize()
    marks: list[tuple[Mark, Mark]] = []
    for _ in range(repeats):
        begin = backend.mark(lane)
        work()
        marks.append((begin, backend.mark(lane)))
    backend.synchronize()
    return [end.since(begin) for begin, end in marks]


def resident_bytes() -> int:
    """Host memory that this process really occupies."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0
