"""How fast the CPU optimizer runs, and what the memory would allow: one JSON row per kernel on stdout.

The step is bound by memory, so the physical rate is the yardstick: ``ceiling`` moves the bytes of the AdamW (26 per parameter:
14 read, 12 written, in place) with next to no arithmetic, in the same process, on buffers of the same kind, taking turns with
it. Rates are of the best repeat, as STREAM's are; the median stands beside it and tells how quiet the machine was. The claim
is a share of at least 90 %; the exit status says whether it holds.

    python benchmarks/adamw.py --params 200e6 --threads 16
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rows import common, emit, is_done, options
from torch import Tensor

from layerferry.backends.cpu import CpuBackend
from layerferry.optim.kernels import AdamWScalars, Kernels
from layerferry.optim.load import load_kernels
from layerferry.optim.native_kernels import NativeKernels
from layerferry.optim.reference import ReferenceKernels

BYTES_PER_PARAM = 26
"""Read 14 (weight 2, residue 2, gradient 2, moments 8) and written 12 (all but the gradient)."""
CLAIMED_SHARE = 0.90

Planes = dict[str, Tensor]


def planes_of(numel: int) -> Planes:
    """Planes of a unit with ``numel`` parameters, [numel] each @host, 64-byte aligned, holding ordinary values."""
    planes = {
        "weight": torch.zeros(numel, dtype=torch.bfloat16),
        "residue": torch.zeros(numel, dtype=torch.int16),
        "grad": torch.zeros(numel, dtype=torch.bfloat16),
        "exp_avg": torch.zeros(numel),
        "exp_avg_sq": torch.zeros(numel),
    }
    for name, plane in planes.items():
        assert plane.data_ptr() % 64 == 0, name
    planes["grad"].normal_(0.0, 1e-3)
    planes["weight"].normal_(0.0, 2e-2)
    return planes


def scalars_of(step: int) -> AdamWScalars:
    return AdamWScalars.of(lr=1e-5, step=step, grad_scale=0.5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


def split_step(kernels: Kernels, planes: Planes, threads: int) -> None:
    arrays = (planes[name] for name in ("weight", "residue", "grad", "exp_avg", "exp_avg_sq"))
    kernels.adamw_split(*arrays, scalars=scalars_of(10), threads=threads)


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


def row(kernel: str, numel: int, threads: int, samples_s: list[float]) -> dict[str, object]:
    best_s = min(samples_s)
    return {
        "benchmark": "adamw",
        "case": case_of(kernel, numel, threads),
        "kernel": kernel,
        "params": numel,
        "threads": threads,
        "ns_per_param": round(best_s / numel * 1e9, 4),
        "ns_per_param_median": round(statistics.median(samples_s) / numel * 1e9, 4),
        "gb_per_s": round(numel * BYTES_PER_PARAM / best_s / 1e9, 2),
    }


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--params", type=float, default=50e6, help="parameters of the unit (default 50e6)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--reference", action="store_true", help="also time the torch reference")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    kernels = load_kernels()
    if not isinstance(kernels, NativeKernels):
        print("no native kernels: nothing to measure", file=sys.stderr)
        return 1
    numel, threads = int(args.params), args.threads
    if is_done(args, case_of("adamw_split_bf16", numel, threads)):
        return 0
    torch.set_num_threads(threads)
    planes, spoilt = planes_of(numel), planes_of(numel)

    def ceiling() -> None:
        kernels.ceiling(*spoilt.values(), threads=threads)

    step_s, ceiling_s = alternating([lambda: split_step(kernels, planes, threads), ceiling], args.repeats)
    share = min(ceiling_s) / min(step_s)
    rows = [
        row("adamw_split_bf16", numel, threads, step_s) | {"share_of_ceiling": round(share, 4)},
        row("ceiling", numel, threads, ceiling_s),
    ]
    if args.reference:
        [reference_s] = alternating([lambda: split_step(ReferenceKernels(), planes, threads)], 2)
        rows.append(row("reference_split_bf16", numel, threads, reference_s))
    for line in rows:
        emit(args, {**line, **common(CpuBackend(), args)})
    return 0 if share >= CLAIMED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
