"""How fast the CPU optimizers run, and what the memory would allow: one JSON row per format on stdout.

The step is bound by memory, so the physical rate is the yardstick: ``ceiling`` moves the bytes of the AdamW (26 per parameter:
14 read, 12 written, in place) with next to no arithmetic, in the same process, on buffers of the same kind, taking turns with
it. Rates are of the best repeat, as STREAM's are; the median stands beside it and tells how quiet the machine was. The claim
is a share of the ceiling's bytes a second: 90 % for AdamW with fp32 moments, 60 % for the formats that move half the bytes and
calculate more on each, 40 % for Adafactor, which calculates in three passes; the exit status says whether it holds.

Of Muon the two passes over a matrix are timed: what lies between them is the device's. Adafactor has a matrix of 4,096 columns,
as models have them; every other rule is elementwise and gets one vector.

    python benchmarks/adamw.py --params 200e6 --threads 16 --format adamw,adamw_8bit
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rows import common, emit, is_done, options
from torch import Tensor

from layerferry.backends.cpu import CpuBackend
from layerferry.layout import GRAD, MATRICES, WEIGHT, Layout, ParameterSpec, Plane
from layerferry.optim.adafactor import Adafactor
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import Optimizer, StepHyper
from layerferry.optim.formats import FormattedOptimizer, StateFormat
from layerferry.optim.lion import Lion
from layerferry.optim.load import load_kernels
from layerferry.optim.muon import Muon
from layerferry.optim.native_kernels import NativeKernels
from layerferry.optim.orthogonal import Stack
from layerferry.optim.reference import ReferenceKernels
from layerferry.optim.sgd import SGD
from layerferry.planner.updates import moved_bytes_per_param
from layerferry.store.store import plane_specs

LEAN = StateFormat(master="24bit", moments="8bit")


class Passes(Muon):
    """What the CPU does of a Muon update."""

    def orthogonalise(self, stack: Stack, values: Tensor, workspace: Tensor) -> None:
        pass


FORMATS: dict[str, Optimizer] = {
    "adamw": AdamW(weight_decay=0.01),
    "adamw_8bit": AdamW(weight_decay=0.01, state_format=LEAN),
    "adamw_8bit-bf16": AdamW(weight_decay=0.01, state_format=StateFormat(master="bf16", moments="8bit")),
    "adamw-bf16": AdamW(weight_decay=0.01, state_format=StateFormat(master="bf16")),
    "lion": Lion(weight_decay=0.01),
    "lion_8bit": Lion(weight_decay=0.01, state_format=LEAN),
    "adafactor": Adafactor(weight_decay=0.01),
    "muon": Passes(weight_decay=0.01),
    "muon_8bit": Passes(weight_decay=0.01, state_format=LEAN),
    "sgd": SGD(momentum=0.9),
}
CLAIMED_SHARE = {"adamw": 0.90, "adafactor": 0.40}
CLAIMED_SHARE_OF_OTHERS = 0.60
CEILING_BYTES = 26
FACTORED_COLUMNS = 4096

Planes = dict[str, Plane]


def planes_of(optimizer: Optimizer, layout: Layout) -> Planes:
    """Planes of a unit @host, 64-byte aligned, holding ordinary values."""
    specs = plane_specs(optimizer.state_planes)
    planes = {kind: Plane(layout, spec, torch.zeros(layout.bytes(spec), dtype=torch.uint8)) for kind, spec in specs.items()}
    for name, plane in planes.items():
        assert plane.buffer.data_ptr() % 64 == 0, name
    planes[GRAD].views()[0].normal_(0.0, 1e-3)
    planes[WEIGHT].views()[0].normal_(0.0, 2e-2)
    return planes


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternating(works: list[Callable[[], None]], repeats: int) -> list[list[float]]:
    """Seconds of each repeat, per work; they take turns, after one unmeasured turn: slow spells of a machine meet them all."""
    rounds = [[seconds(work) for work in works] for _ in range(repeats + 1)][1:]
    return [list(samples) for samples in zip(*rounds, strict=True)]


def case_of(kernel: str, numel: int, threads: int) -> str:
    return f"{kernel}-{numel}-{threads}"


def row(kernel: str, numel: int, threads: int, samples_s: list[float], bytes_per_param: float) -> dict[str, object]:
    best_s = min(samples_s)
    return {
        "benchmark": "adamw",
        "case": case_of(kernel, numel, threads),
        "kernel": kernel,
        "params": numel,
        "threads": threads,
        "ns_per_param": round(best_s / numel * 1e9, 4),
        "ns_per_param_median": round(statistics.median(samples_s) / numel * 1e9, 4),
        "gb_per_s": round(numel * bytes_per_param / best_s / 1e9, 2),
    }


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--params", type=float, default=50e6, help="parameters of the unit (default 50e6)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--format", default="adamw", help=f"of {', '.join(FORMATS)}; several by comma")
    parser.add_argument("--reference", action="store_true", help="also time the torch reference")
    return parser


def shape_of(optimizer: Optimizer, numel: int) -> tuple[int, ...]:
    if isinstance(optimizer, Adafactor):
        return (-(-numel // FACTORED_COLUMNS), FACTORED_COLUMNS)
    return (2, numel // 2) if isinstance(optimizer, Muon) else (numel,)


def measure(name: str, args: argparse.Namespace) -> tuple[list[dict[str, object]], float]:
    """The rows of one format, and its share of the ceiling."""
    optimizer, kernels, threads = FORMATS[name], load_kernels(), args.threads
    assert isinstance(kernels, NativeKernels)
    shape = shape_of(optimizer, int(args.params))
    layout = Layout.of([ParameterSpec(name="weight", shape=shape, dtype=torch.bfloat16, matrix=len(shape) > 1)])
    numel = layout.numel
    planes, spoilt = planes_of(optimizer, layout), planes_of(FORMATS["adamw"], layout)
    moved = moved_bytes_per_param(plane_specs(optimizer.state_planes), MATRICES)

    def step(by: Optimizer) -> Callable[[], None]:
        return lambda: by.step(planes, layout, StepHyper(lr=1e-5, step=10, grad_scale=0.5), threads)

    def ceiling() -> None:
        kernels.ceiling(*(plane.tensors()[0] for plane in spoilt.values()), threads=threads)

    step_s, ceiling_s = alternating([step(optimizer), ceiling], args.repeats)
    share = (moved / min(step_s)) / (CEILING_BYTES / min(ceiling_s))
    rows = [
        row(name, numel, threads, step_s, moved) | {"share_of_ceiling": round(share, 4)},
        row(f"{name}-ceiling", numel, threads, ceiling_s, CEILING_BYTES),
    ]
    if args.reference and isinstance(optimizer, FormattedOptimizer | Adafactor):
        plain = copy.copy(optimizer)
        plain._host_kernels = ReferenceKernels()
        [reference_s] = alternating([step(plain)], 2)
        rows.append(row(f"{name}-reference", numel, threads, reference_s, moved))
    return rows, share


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if not isinstance(load_kernels(), NativeKernels):
        print("no native kernels: nothing to measure", file=sys.stderr)
        return 1
    torch.set_num_threads(args.threads)
    holds = True
    for name in args.format.split(","):
        if is_done(args, case_of(name, math.prod(shape_of(FORMATS[name], int(args.params))), args.threads)):
            continue
        rows, share = measure(name, args)
        for line in rows:
            emit(args, {**line, **common(CpuBackend(), args)})
        holds &= share >= CLAIMED_SHARE.get(name, CLAIMED_SHARE_OF_OTHERS)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
