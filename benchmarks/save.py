"""Writing a checkpoint: the rate of our writer beside the raw rate of the same disk in the same run.

    python benchmarks/save.py --model qwen2.5-1.5b --layers 18 --vocab 32000 --work /disk/with/room

fills the planes of a model with random bytes and saves it, alternating with the raw rate: direct writes of 16 MiB by one and by
four threads, flushed, whichever is faster. ``--spare`` GiB of host memory may hold copies; ``released_s`` is when the
last unit could be updated again. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rows import common, emit, options, say
from shapes import config_of

import layerferry
from layerferry.backends import make
from layerferry.checkpoint.save import Saver
from layerferry.config import Config, EngineConfig, ModelConfig
from layerferry.engine.engine import Engine
from layerferry.plan import GIB, Plan

RAW_BYTES = 1 << 24


def engine_of(args: Any) -> Engine:
    """A model whose planes hold random bytes: a disk that compresses must not win."""
    plan = Plan(on_device=tuple(range(args.home)), micro_batch_rows=1, row_tokens=64, rows_per_step=1)
    with tempfile.TemporaryDirectory() as folder:
        model, where = ModelConfig(model_name_or_path=folder, train_from_scratch=True), EngineConfig(device=args.device)
        config_of(args.model, layers=args.layers or None, vocab=args.vocab or None).save_pretrained(folder)
        engine = layerferry.load(folder, config=Config(model=model, engine=where), plan=plan, backend=make(args.device))
    for unit in engine.store.units:
        for plane in engine.store.planes(unit).values():
            plane.buffer.random_(0, 255)
    return engine


def raw_bytes_per_s(folder: Path, num_bytes: int, threads: int) -> float:
    """Direct writes of random bytes, flushed: what the disk can take."""
    path, buffer = folder / "raw", mmap.mmap(-1, RAW_BYTES)
    torch.frombuffer(buffer, dtype=torch.uint8).random_(0, 255)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        positions = range(0, num_bytes // RAW_BYTES * RAW_BYTES, RAW_BYTES)
        list(pool.map(lambda position: os.pwrite(descriptor, buffer, position), positions))
    os.fsync(descriptor)
    seconds = time.perf_counter() - begin
    os.close(descriptor)
    path.unlink()
    return num_bytes // RAW_BYTES * RAW_BYTES / seconds


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--model", default="qwen2.5-1.5b", help="a shape of shapes.py")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32000, help="0: the model's")
    parser.add_argument("--home", type=int, default=0, help="units, from the embedding on, that live on the device")
    parser.add_argument("--spare", type=float, default=0.0, help="GiB of host memory for copies")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(), help="folder on the disk that is measured; nothing stays in it")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="save-benchmark-", dir=args.work))
    engine = engine_of(args)
    saver = Saver(engine, folder, run="0123456789abcdef", keep=1, spare_bytes=lambda: int(args.spare * GIB))
    raw, ours, released = [], [], []
    for number in range(args.repeats):
        raw.append(max(raw_bytes_per_s(folder, saver.num_bytes, threads) for threads in (1, 4)))
        saver.start(number + 1, {})
        saved = saver.take_outcome(wait=True)
        assert saved is not None and saved.fault is None, saved
        ours.append(saved.num_bytes / saved.seconds)
        released.append(saved.released_s)
        say(f"raw {raw[-1] / 1e9:.2f} GB/s, saved at {ours[-1] / 1e9:.2f}, updates possible after {released[-1]:.2f} s")
    saver.close()
    engine.close()
    shutil.rmtree(folder)
    row = {
        "benchmark": "save",
        "model": f"{args.model}, {len(engine.skeleton.layer_units)} layers",
        "gigabytes": round(saver.num_bytes / 1e9, 3),
        "raw_gb_per_s": round(statistics.median(raw) / 1e9, 3),
        "save_gb_per_s": round(statistics.median(ours) / 1e9, 3),
        "released_s": round(statistics.median(released), 3),
        "spare_gib": args.spare,
        **common(engine.backend, args),
    }
    emit(args, row)


if __name__ == "__main__":
    main()
