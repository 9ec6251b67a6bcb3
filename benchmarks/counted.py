"""Steps that count: a warm-up, then steps of random rows, each with its seconds and what stood still for what."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from threading import Event

from rows import packed_batches, random_batches, say

from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import Engine
from layerferry.plan import GIB


@dataclass(slots=True)
class Counted:
    """Of every counted step, in order: seconds, what stood still for what, tokens that were trained on."""

    seconds: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    disk: list[list[float]] = field(default_factory=list)
    uploaded: int = 0
    """Bytes of the last step."""
    drained: int = 0


def counted(engine: Engine, args: argparse.Namespace, told: Event) -> Counted:
    """The warm-up and then the steps that count; once ``told`` to end, no further than to the first of these."""
    found = Counted()
    for number in range(args.warmup + args.steps):
        if number == args.warmup:
            engine.backend.reset_peak()
        one_step(engine, args, number, found)
        if told.is_set() and found.seconds:
            say(f"told to end: {len(found.seconds)} of {args.steps} steps count")
            break
    return found


def one_step(engine: Engine, args: argparse.Namespace, number: int, found: Counted) -> None:
    batches = batches_for(engine, args)
    (up0, down0), busy0, disk0 = moved(engine), engine.deferred.busy_s, on_disk(engine)
    begin = time.perf_counter()
    report = engine.step(batches, lr=1e-5)
    if args.settle:
        engine.settle()
    step_s = time.perf_counter() - begin
    (up, down), busy_s = moved(engine), engine.deferred.busy_s - busy0
    found.uploaded, found.drained = up - up0, down - down0
    if number >= args.warmup:
        found.seconds.append(step_s)
        found.tokens.append(report.num_tokens)
        found.link.append(report.exposed_link_s)
        found.optimizer.append(report.exposed_optimizer_s + step_s - report.seconds)
        found.busy.append(busy_s)
        found.disk.append([after - before for before, after in zip(disk0, on_disk(engine), strict=True)])
    say(
        f"step {number}: {step_s:.3f} s loss {report.loss:.4f} norm {report.grad_norm:.3f} "
        f"exposed: optimizer {report.exposed_optimizer_s:.3f} s, link {report.exposed_link_s:.3f} s; "
        f"optimizer {busy_s:.2f} s peak {engine.backend.peak_bytes() / GIB:.2f} GiB"
    )


def moved(engine: Engine) -> tuple[int, int]:
    """Bytes (up, down) since the start."""
    return engine.feed.uploaded_bytes + engine.kept.returned_bytes, engine.drain.drained_bytes + engine.kept.sent_bytes


def on_disk(engine: Engine) -> tuple[float, float, float]:
    """Bytes (read, written) and busy seconds since the start."""
    tier = engine.store.disk
    return (0.0, 0.0, 0.0) if tier is None else (tier.bytes_read, tier.bytes_written, tier.busy_s)


def batches_for(engine: Engine, args: argparse.Namespace) -> list[MicroBatch]:
    shape = {"rows": args.rows, "row_tokens": args.row_tokens, "micro_batch_rows": engine.plan.micro_batch_rows}
    if args.sample_tokens:
        return packed_batches(**shape, vocab_size=engine.skeleton.vocab_size, sample_tokens=args.sample_tokens)
    return random_batches(**shape, vocab_size=engine.skeleton.vocab_size)
