"""What kind of host pages the planes should have: one JSON row per kind on stdout.

Kinds: ``shared`` (anonymous pages as ``mmap`` gives them by default, with the wish for huge ones), ``private``, and ``engine``
(what ``layerferry/backends/pages.py`` gives: private, huge where the system allows, not inherited, spread over memory nodes).
Measured for each: the first touch by all threads, AdamW's update of planes of that kind (the kinds take turns), how many of
the bytes are resident, and how many in huge pages. Memory that a virtual machine has never handed out is slow to get the
first time, whoever asks, so everything is touched once before it counts.

    python benchmarks/pages.py --params 400e6 --threads 16
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from adamw import alternating
from rows import common, emit, is_done, options
from torch import Tensor

from layerferry.backends.cpu import CpuBackend
from layerferry.backends.numa import own_nodes
from layerferry.backends.pages import host_pages
from layerferry.layout import GRAD, WEIGHT, Layout, ParameterSpec, Plane
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import StepHyper
from layerferry.plan import GIB
from layerferry.store.store import plane_specs

THP = Path("/sys/kernel/mm/transparent_hugepage")


def shared(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()


def private(num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8).zero_()


def engine(num_bytes: int) -> Tensor:
    return host_pages(num_bytes)[0]


KINDS: dict[str, Callable[[int], Tensor]] = {"shared": shared, "private": private, "engine": engine}


def case_of(kind: str, numel: int, threads: int) -> str:
    return f"pages-{kind}-{numel}-{threads}"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("AnonHugePages", "ShmemPmdMapped")))


def setting(name: str) -> str:
    """The chosen word of a kernel setting."""
    try:
        text = (THP / name).read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def planes_of(kind: str, layout: Layout) -> tuple[dict[str, Plane], dict[str, float]]:
    """AdamW's planes on pages of ``kind``, and what it took to get them."""
    specs = plane_specs(AdamW().state_planes)
    num_bytes = sum(layout.bytes(spec) for spec in specs.values())
    planes: dict[str, Plane] = {}
    for _ in range(2):  # the second time counts
        planes.clear()
        before, huge, begin = resident_bytes(), huge_bytes(), time.perf_counter()
        planes.update({name: Plane(layout, spec, KINDS[kind](layout.bytes(spec))) for name, spec in specs.items()})
        touch_s = time.perf_counter() - begin
        facts = {
            "first_touch_s_per_gib": round(touch_s * GIB / num_bytes, 4),
            "resident_share": round((resident_bytes() - before) / num_bytes, 4),
            "huge_share": round((huge_bytes() - huge) / num_bytes, 4),
        }
    for plane in (planes[WEIGHT], planes[GRAD]):
        plane.views()[0].normal_(0.0, 1e-2)
    return planes, facts


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--params", type=float, default=100e6, help="parameters of the planes, 14 bytes each (default 100e6)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=9)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    numel, threads, optimizer = int(args.params), args.threads, AdamW()
    kinds = [kind for kind in KINDS if not is_done(args, case_of(kind, numel, threads))]
    if not kinds:
        return 0
    torch.set_num_threads(threads)
    layout = Layout.of([ParameterSpec(name="weight", shape=(numel,), dtype=torch.bfloat16)])
    made = {kind: planes_of(kind, layout) for kind in kinds}

    def step(planes: dict[str, Plane]) -> Callable[[], None]:
        return lambda: optimizer.step(planes, layout, StepHyper(lr=1e-5, step=10), threads)

    for kind, samples_s in zip(kinds, alternating([step(planes) for planes, _ in made.values()], args.repeats), strict=True):
        row = {
            "benchmark": "pages",
            "case": case_of(kind, numel, threads),
            "kind": kind,
            "params": numel,
            "threads": threads,
            **made[kind][1],
            "adamw_ns_per_param": round(min(samples_s) / numel * 1e9, 4),
            "adamw_ns_per_param_median": round(statistics.median(samples_s) / numel * 1e9, 4),
            "nodes": len(own_nodes()),
            "huge_pages": {"private": setting("enabled"), "shared": setting("shmem_enabled")},
        }
        emit(args, {**row, **common(CpuBackend(), args)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
