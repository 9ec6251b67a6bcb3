"""How fast the link is: upload and download alone and together, by size of a copy, from pinned and from ordinary memory.

    python benchmarks/link.py --chunk-mib 1,16,256 --out benchmarks/results/link.jsonl

Copies run on the backend's own lanes, as in training, and are timed by marks in those lanes. Together means that both lanes
are filled at once; each rate is that of its own lane. A copy from ordinary memory blocks the thread that asks for it, so
there the two directions take turns: that is what the row shows. On a CPU a lane is a copy in host memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rows import common, emit, is_done, numbers, options
from torch import Tensor

from layerferry.backends import Backend, make
from layerferry.backends.base import Lane

RATES = {Lane.UPLOAD: "upload_gb_per_s", Lane.DOWNLOAD: "download_gb_per_s"}
WAYS = {"upload": (Lane.UPLOAD,), "download": (Lane.DOWNLOAD,), "together": (Lane.UPLOAD, Lane.DOWNLOAD)}


def seconds(backend: Backend, lanes: Sequence[Lane], buffers: dict[Lane, tuple[Tensor, Tensor]], copies: int) -> list[float]:
    """Seconds for which each of ``lanes`` was busy with ``copies`` copies; the lanes are filled in turn."""
    begin = [backend.mark(lane) for lane in lanes]
    for _ in range(copies):
        for lane in lanes:
            backend.copy(lane, *buffers[lane])
    end = [backend.mark(lane) for lane in lanes]
    backend.synchronize()
    return [after.since(before) for before, after in zip(begin, end, strict=True)]


def row(backend: Backend, way: str, *, chunk_bytes: int, copies: int, repeats: int, pinned: bool) -> dict[str, Any]:
    """The best repeat, as STREAM counts."""
    lanes = WAYS[way]
    host = {lane: backend.host_buffer(chunk_bytes, travels=pinned) for lane in lanes}
    device = {lane: backend.device_buffer(chunk_bytes) for lane in lanes}
    upload = Lane.UPLOAD
    buffers = {lane: (device[lane], host[lane]) if lane is upload else (host[lane], device[lane]) for lane in lanes}
    runs = [seconds(backend, lanes, buffers, copies) for _ in range(repeats + 1)][1:]
    best = [min(samples) for samples in zip(*runs, strict=True)]
    rates = {RATES[lane]: round(chunk_bytes * copies / s / 1e9, 2) for lane, s in zip(lanes, best, strict=True)}
    return {"way": way, "pinned": pinned, "chunk_mib": chunk_bytes / 2**20, "copies": copies, **rates}


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--chunk-mib", type=numbers(float), default=[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0], help="sizes of a copy")
    parser.add_argument("--total-mib", type=float, default=2048.0, help="moved in a repeat, each way")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    backend = make(args.device)
    for pinned in (True, False):
        for way in WAYS:
            for chunk_mib in args.chunk_mib:
                case = f"link-{way}-{chunk_mib:g}mib-{'pinned' if pinned else 'pageable'}"
                if is_done(args, case):
                    continue
                copies = max(1, round(args.total_mib / chunk_mib))
                found = row(backend, way, chunk_bytes=int(chunk_mib * 2**20), copies=copies, repeats=args.repeats, pinned=pinned)
                emit(args, {"benchmark": "link", "case": case, **found, **common(backend, args)})


if __name__ == "__main__":
    main()
