"""Whole training steps at a model's real shape, exact clipping and the optimizer included.

    python benchmarks/step.py --model qwen2.5-7b --rows 128 --row-tokens 1024 --micro-batch-rows 32 --budget 0.0

prints one JSON object (benchmarks/README.md says what its fields mean) and appends it to ``--out``. Weights and tokens are
random.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from shapes import config_of

import layerferry
from layerferry.backends import make
from layerferry.config import Config, EngineConfig, ModelConfig, OptimConfig, TrainConfig
from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import Engine
from layerferry.plan import GIB, Plan


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument("--micro-batch-rows", type=int, default=2)
    parser.add_argument("--waves", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--slabs", type=int, default=2)
    parser.add_argument("--auto", type=int, default=0, help="1: the planner chooses everything but rows and their length")
    parser.add_argument("--device-memory", type=float, default=0.0, help="GiB that the planner may use; 0: what is there")
    parser.add_argument("--home", type=int, default=0, help="units, from the embedding on, that live on the device")
    parser.add_argument("--resident-gradients", type=int, default=0)
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=0, help="optimizer threads; 0: cores - 2")
    parser.add_argument("--steps", type=int, default=5, help="counted steps, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--variants", default="", help="further plans over the same store, e.g. 'budget=0.0;budget=0.3,micro_batch_rows=8'"
    )
    parser.add_argument("--timeline", help="record one more step into this folder: timeline.json and timeline.png")
    parser.add_argument("--profile", help="write a torch profiler table of one more step to this file")
    parser.add_argument("--out", default="")
    return parser.parse_args()


def random_batches(args: argparse.Namespace, engine: Engine) -> list[MicroBatch]:
    batches = []
    for start in range(0, args.rows, engine.plan.micro_batch_rows):
        rows = min(engine.plan.micro_batch_rows, args.rows - start)
        ids = torch.randint(0, int(engine.skeleton.vocab_size), (rows, args.row_tokens))
        batches.append(MicroBatch(input_ids=ids, labels=ids.clone(), lengths=torch.full((rows,), args.row_tokens)))
    return batches


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def plan_of(args: argparse.Namespace, on_cuda: bool) -> Plan:
    cores = len(os.sched_getaffinity(0))
    return Plan(
        on_device=tuple(range(args.home)),
        resident_gradients=bool(args.resident_gradients),
        num_slots=args.slots,
        num_slabs=args.slabs,
        num_waves=args.waves,
        activation_budget=args.budget,
        compile=on_cuda and not args.no_compile,
        chunk_tokens=args.chunk_tokens,
        optimizer_threads=args.threads or max(1, cores - 2),
        micro_batch_rows=args.micro_batch_rows,
        row_tokens=args.row_tokens,
        rows_per_step=args.rows,
    )


def build(args: argparse.Namespace) -> tuple[Engine, int]:
    """The engine, and the growth of the resident set while its store was built."""
    backend = make(args.device)
    with tempfile.TemporaryDirectory() as folder:
        config_of(args.model, layers=args.layers).save_pretrained(folder)
        config = Config(
            model=ModelConfig(model_name_or_path=folder, train_from_scratch=True),
            optim=OptimConfig(weight_decay=0.01),
            train=TrainConfig(per_device_train_batch_size=args.rows),
            engine=EngineConfig(device=args.device, device_memory=int(args.device_memory * GIB) or None),
        )
        if backend.name == "cuda":
            torch.zeros(1, device=backend.device)  # the context itself is no part of the store
        before, begin = resident_bytes(), time.perf_counter()
        plan = None if args.auto else plan_of(args, backend.name == "cuda")
        engine = layerferry.load(folder, config=config, plan=plan, backend=backend, row_tokens=args.row_tokens)
        backend.synchronize()
    resident = resident_bytes() - before
    build_s = time.perf_counter() - begin
    say(f"built in {build_s:.1f} s: {engine.num_params / 1e9:.3f}B parameters, resident {resident / GIB:.2f} GiB")
    return engine, resident


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def flops_per_step(engine: Engine, args: argparse.Namespace) -> float:
    """6 N_matmul tokens + 6 L H S tokens: DESIGN's formula, embeddings not counted, causal attention, no recomputation."""
    text: Any = engine.skeleton.config.get_text_config()
    layers = sum(p.numel() for layer in engine.skeleton.layers for p in layer.parameters() if p.dim() > 1)
    head = text.vocab_size * text.hidden_size
    heads = getattr(text, "num_attention_heads", 0) * (
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    )
    tokens = args.rows * args.row_tokens
    return 6.0 * (layers + head) * tokens + 6.0 * text.num_hidden_layers * heads * args.row_tokens * tokens


def git_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def measure(engine: Engine, args: argparse.Namespace, resident: int) -> dict[str, Any]:
    """One row: the median of ``args.steps`` steps after the warm-up."""
    backend = engine.backend
    seconds, link, optimizer, busy = [], [], [], []
    uploaded = drained = 0
    for number in range(args.warmup + args.steps):
        batches = random_batches(args, engine)
        if number == args.warmup:
            backend.reset_peak()
        up0, down0, busy0 = engine.feed.uploaded_bytes, engine.drain.drained_bytes, engine.deferred.busy_s
        begin = time.perf_counter()
        report = engine.step(batches, lr=1e-5)
        step_s = time.perf_counter() - begin
        uploaded, drained = engine.feed.uploaded_bytes - up0, engine.drain.drained_bytes - down0
        if number >= args.warmup:
            seconds.append(step_s)
            link.append(report.exposed_link_s)
            optimizer.append(report.exposed_optimizer_s)
            busy.append(engine.deferred.busy_s - busy0)
        say(
            f"step {number}: {step_s:.3f} s loss {report.loss:.4f} norm {report.grad_norm:.3f} "
            f"exposed: optimizer {report.exposed_optimizer_s:.3f} s, link {report.exposed_link_s:.3f} s; "
            f"optimizer {engine.deferred.busy_s - busy0:.2f} s peak {backend.peak_bytes() / GIB:.2f} GiB"
        )
    step_s, flops, tokens = statistics.median(seconds), flops_per_step(engine, args), args.rows * args.row_tokens
    return {
        "case": args.case or f"{args.model}-{tokens}",
        "model": args.model,
        "layers": len(engine.skeleton.layer_units),
        "row_tokens": args.row_tokens,
        "tokens_per_step": tokens,
        "step_s": round(step_s, 4),
        "step_s_all": [round(s, 4) for s in seconds],
        "model_tflops": round(flops / step_s / 1e12, 1),
        "tokens_per_s": round(tokens / step_s, 1),
        "device_peak_gib": round(backend.peak_bytes() / GIB, 3),
        "host_resident_gib": round(resident / GIB, 3),
        "bytes_per_param": round(resident / engine.num_params, 3),
        "planned_bytes_per_param": round(engine.store.num_bytes / engine.num_params, 3),
        "exposed_optimizer_s": round(statistics.median(optimizer), 4),
        "exposed_link_s": round(statistics.median(link), 4),
        "optimizer_busy_s": round(statistics.median(busy), 3),
        "h2d_gb_per_s": round(uploaded / step_s / 1e9, 2),
        "d2h_gb_per_s": round(drained / step_s / 1e9, 2),
        "predicted_step_s": None if engine.plan.seconds is None else round(engine.plan.seconds.step, 3),
        "predicted_device_gib": round(engine.plan.total("@device") / GIB, 3) if engine.plan.items else None,
        "plan": engine.plan.to_dict()["choice"],
        "machine": machine(backend),
        "torch": torch.__version__,
        "commit": git_commit(),
        "date": datetime.date.today().isoformat(),
    }


def variants(args: argparse.Namespace) -> list[argparse.Namespace]:
    """``args`` itself, then one more for every entry of ``--variants``."""
    found = [args]
    for entry in filter(None, args.variants.split(";")):
        other = argparse.Namespace(**vars(args))
        for pair in entry.split(","):
            name, _, value = pair.partition("=")
            setattr(other, name, type(getattr(args, name))(value))
        found.append(other)
    return found


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    engine, resident = build(args)
    previous = args
    for number, variant in enumerate(variants(args)):
        if number:
            skeleton, store, optimizer, backend = engine.skeleton, engine.store, engine.optimizer, engine.backend
            engine.settle()
            engine.close()
            del engine
            gc.collect()
            if variant.auto or (variant.home, variant.model) != (previous.home, previous.model):
                del skeleton, store, optimizer, backend
                gc.collect()
                engine, resident = build(variant)
            else:
                engine = Engine(skeleton, store, optimizer, backend, plan_of(variant, backend.name == "cuda"))
        previous = variant
        line = json.dumps(measure(engine, variant, resident))
        print(line, flush=True)
        if args.out:
            with open(args.out, "a") as stream:
                stream.write(line + "\n")
        if args.timeline and number == 0:
            timeline(engine, variant, Path(args.timeline))
        if args.profile and number == 0:
            profile(engine, random_batches(variant, engine), args.profile)
    engine.close()


def machine(backend: Any) -> str:
    device = backend.describe() if backend.name == "cuda" else platform.processor() or "cpu"
    return f"{device}, {len(os.sched_getaffinity(0))} cores"


def timeline(engine: Engine, args: argparse.Namespace, folder: Path) -> None:
    """Two steps, the second recorded, so that it shows the first one's updates in its forward."""
    from layerferry.trainer.timeline import draw, write_trace

    batches = random_batches(args, engine)
    engine.step(batches, lr=1e-5)
    engine.clock.start_recording()
    report = engine.step(batches, lr=1e-5)
    spans = engine.clock.stop_recording()
    folder.mkdir(parents=True, exist_ok=True)
    write_trace(spans, folder / "timeline.json")
    draw(spans, folder / "timeline.png", title=f"{args.model}: one step of {report.num_tokens} tokens, {report.seconds:.2f} s")


def profile(engine: Engine, batches: list[MicroBatch], path: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        engine.step(batches, lr=1e-5)
        engine.settle()
        engine.backend.synchronize()
    Path(path).write_text(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90))


if __name__ == "__main__":
    main()
