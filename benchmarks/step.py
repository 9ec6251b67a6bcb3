"""Whole training steps at a model's real shape, exact clipping and the optimizer included.

    python benchmarks/step.py --model qwen2.5-7b --rows 128 --row-tokens 1024 --micro-batch-rows 32 --activation-budget 0.0

prints one JSON object (benchmarks/README.md says what its fields mean) and appends it to ``--out``. Weights and tokens are
random. Every field of a plan has an option of its name: the plan is written by hand, or with ``--auto`` it is the planner's, and
what is given is pinned. ``--variants`` measures further plans over the same store, which saves the minutes that filling it takes.
SIGTERM ends the present step; the row is then that of the steps so far.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any, get_args, get_type_hints

import torch
from attention import AttentionShape, attention_seconds
from counted import Counted, batches_for, counted
from rows import Steps, emit, is_done, options, resident_bytes, say, significant, step_row
from shapes import config_of

import layerferry
from layerferry.backends import make
from layerferry.backends.cuda import CudaBackend
from layerferry.config import Config, DataConfig, EngineConfig, ModelConfig, OptimConfig, Pins, TrainConfig
from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import Engine
from layerferry.plan import FREE_BUDGET, GIB, Plan
from layerferry.planner import calibrate, choose_for
from layerferry.planner.disk_rates import disk_rates
from layerferry.planner.facts import Model
from layerferry.planner.flops import flops_per_token
from layerferry.planner.machine import machine_for
from layerferry.planner.problem import key_of, problem
from layerferry.store.store import plane_specs


def _kind(hint: Any) -> Callable[[str], Any]:
    """How an option of type ``hint | None`` is read; a truth value as 0 or 1."""
    (kind,) = (one for one in get_args(hint) if one is not type(None))
    return (lambda text: bool(int(text))) if kind is bool else kind


FIELDS: dict[str, Callable[[str], Any]] = {name: _kind(hint) for name, hint in get_type_hints(Pins).items()}
"""Of a plan, as a user may pin them."""
BY_HAND: dict[str, Any] = {
    "device_units": 0,
    "disk_units": 0,
    "micro_batch_rows": 2,
    "chunk_tokens": 8192,
    "richer_budget": FREE_BUDGET,
}
"""What a plan has that is not the planner's, where nothing else is said; all else is as ``Plan`` has it."""


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--model", default="tiny", help="a shape of shapes.py")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the model has")
    parser.add_argument("--width", type=float, default=1.0, help="factor on hidden size, heads and MLP")
    parser.add_argument("--vocab", type=int, default=0, help="0: the model's")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument(
        "--sample-tokens", type=int, default=0, help="rows are packed with samples of this mean length, kept apart"
    )
    parser.add_argument("--auto", type=int, default=0, help="1: the planner chooses what of the plan is not given")
    parser.add_argument("--device-memory", type=float, default=0.0, help="GiB that the planner may use; 0: what is there")
    parser.add_argument("--host-memory", type=float, default=0.0, help="GiB of host memory that it may use; 0: what is there")
    parser.add_argument("--disk-folder", default=".", help="on that disk, which is measured")
    parser.add_argument("--disk-memory", type=float, default=1000.0, help="GiB of it that may be used")
    parser.add_argument("--optim", default="adamw_torch", help="optimizer format: adamw_8bit, lion_8bit ...")
    parser.add_argument("--master-weights", default="auto", help="fp32, 24bit or bf16; auto: what the format likes")
    parser.add_argument("--on-arrival", type=int, default=0, help="1: updates when gradients arrive, without clipping")
    parser.add_argument("--settle", type=int, default=0, help="1: every step waits for its own updates (an ablation)")
    parser.add_argument("--split-from", type=int, default=32768, help="rows from here on say how much of a step is attention")
    parser.add_argument("--steps", type=int, default=5, help="counted steps, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--variants", default="", help="further plans over the same store, e.g. 'activation_budget=0.0;num_slots=1,settle=1'"
    )
    parser.add_argument("--points", default="", help="the same, without the plan of the other options itself")
    parser.add_argument("--timeline", help="record one more step into this folder: timeline.json and timeline.png")
    parser.add_argument("--profile", help="write a torch profiler table of one more step to this file")
    plan = parser.add_argument_group("fields of the plan", "Pins in layerferry/config.py says what they mean")
    for name, kind in FIELDS.items():
        plan.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name.rpartition("_")[2].upper())
    return parser


def variants(args: argparse.Namespace) -> list[argparse.Namespace]:
    """``args`` itself, then one more for every entry of ``--variants``; or those of ``--points``. What is done already is
    left out. A field of the plan with nothing behind its ``=`` is one that is not given."""
    found = [] if args.points else [args]
    for entry in filter(None, (args.points or args.variants).split(";")):
        other = argparse.Namespace(**vars(args))
        for pair in entry.split(","):
            name, _, value = pair.partition("=")
            kind = FIELDS.get(name) or type(getattr(args, name))
            setattr(other, name, kind(value) if value or name not in FIELDS else None)
        found.append(other)
    return [one for one in found if not is_done(one, case_of(one))]


def case_of(args: argparse.Namespace) -> str:
    return str(args.case) or f"{args.model}-{args.rows * args.row_tokens}"


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the plan that have been named."""
    return {name: value for name in FIELDS if (value := getattr(args, name)) is not None}


def plan_of(args: argparse.Namespace, on_cuda: bool) -> Plan:
    layers = int(args.layers or config_of(args.model).num_hidden_layers)
    own = BY_HAND | {"compile": on_cuda, "optimizer_threads": max(1, len(os.sched_getaffinity(0)) - 2)} | given(args)
    device_units, disk_units = own.pop("device_units"), own.pop("disk_units")
    return Plan(
        on_device=tuple(range(device_units)),
        on_disk=tuple(range(layers + 1 - disk_units, layers + 1)),  # the embedding is unit 0
        on_arrival=bool(args.on_arrival),
        row_tokens=args.row_tokens,
        rows_per_step=args.rows,
        **own,
    )


def config_for(args: argparse.Namespace, folder: str) -> Config:
    pins = given(args) if args.auto else {"disk_units": args.disk_units}
    kept = {"optim": args.optim, "master_weights": args.master_weights, "max_grad_norm": 0.0 if args.on_arrival else 1.0}
    return Config(
        model=ModelConfig(model_name_or_path=folder, train_from_scratch=True),
        optim=OptimConfig(weight_decay=0.01, **kept),
        data=DataConfig(neat_packing=bool(args.sample_tokens)),
        train=TrainConfig(per_device_train_batch_size=args.rows),
        engine=EngineConfig(
            device=args.device,
            device_memory=int(args.device_memory * GIB) or None,
            host_memory=int(args.host_memory * GIB) or None,
            update_on_arrival=bool(args.on_arrival),
            disk_memory=int(args.disk_memory * GIB) if args.disk_units else None,
            disk_folder=args.disk_folder,
            **pins,
        ),
    )


def build(args: argparse.Namespace) -> tuple[Engine, int]:
    """The engine, and the growth of the resident set while its store was built, without what its plan keeps beside it."""
    backend = make(args.device)
    backend.drop_workspaces()  # of an engine before this one
    shape = config_of(args.model, layers=args.layers or None, width=args.width, vocab=args.vocab or None)
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        if backend.name == "cuda":
            torch.zeros(1, device=backend.device)  # the context itself is no part of the store
        before, begin = resident_bytes(), time.perf_counter()
        plan = None if args.auto else plan_of(args, backend.name == "cuda")
        config = config_for(args, folder)
        engine = layerferry.load(folder, config=config, plan=plan, backend=backend, row_tokens=args.row_tokens)
        backend.synchronize()
    resident = resident_bytes() - before
    build_s = time.perf_counter() - begin
    say(f"built in {build_s:.1f} s: {engine.num_params / 1e9:.3f}B parameters, resident {resident / GIB:.2f} GiB")
    return engine, resident - engine.kept.host_bytes


def predicted(engine: Engine, args: argparse.Namespace) -> Plan:
    """The engine's plan with what the planner says of it, also where it was written by hand; measured bytes where known."""
    if engine.plan.seconds is not None:
        return engine.plan
    config = config_for(args, args.model)
    specs = plane_specs(engine.optimizer.state_planes)
    machine = machine_for(config.engine, engine.backend, config.disk_folder)
    question = problem(Model.of(engine.skeleton), specs, machine, config, args.row_tokens)
    read = calibrate.reader(engine.skeleton, engine.backend)
    known = {key_of(level): found for level in engine.plan.levels if (found := read(level, question.shape)) is not None}
    return question.having(known).complete(engine.plan)


def measure(engine: Engine, args: argparse.Namespace, resident: int, told: Event) -> dict[str, Any]:
    """One row: the median of ``args.steps`` steps after the warm-up, or of those that were done when it was ``told`` to end."""
    plan = predicted(engine, args)
    found = counted(engine, args, told)
    tokens = round(statistics.mean(found.tokens))
    steps = Steps(
        case=case_of(args),
        model=args.model,
        layers=len(engine.skeleton.layer_units),
        row_tokens=args.row_tokens,
        tokens_per_step=tokens,
        flops_per_step=flops_per_token(engine.skeleton, args.sample_tokens or args.row_tokens) * tokens,
        seconds=found.seconds,
        num_params=engine.num_params,
        peak_bytes=engine.backend.peak_bytes(),
        resident_bytes=resident + engine.kept.host_bytes,
        plan=plan.to_dict()["choice"],
        exposed_optimizer_s=found.optimizer,
        exposed_link_s=found.link,
        uploaded_bytes=found.uploaded,
        downloaded_bytes=found.drained,
        predicted_step_s=None if plan.seconds is None else plan.seconds.step,
        predicted_device_bytes=plan.total("@device"),
    )
    return step_row(steps, own_fields(engine, args, plan, steps, found), engine.backend, args)


def own_fields(engine: Engine, args: argparse.Namespace, plan: Plan, steps: Steps, found: Counted) -> dict[str, Any]:
    """What other benchmarks' rows do not have."""
    backend = engine.backend
    return {
        "planned_bytes_per_param": round(engine.store.num_bytes / engine.num_params, 3),
        "optimizer_busy_s": round(statistics.median(found.busy), 3),
        "planned_by": "planner" if args.auto else "hand",
        "hidden_size": engine.skeleton.hidden_size,
        "vocab_size": engine.skeleton.vocab_size,
        "settled": bool(args.settle),
        "kept_inputs_gib": round(engine.kept.host_bytes / GIB, 3),
        **({"device_reserved_gib": round(backend.reserved_bytes() / GIB, 3)} if isinstance(backend, CudaBackend) else {}),
        **(split(engine, steps) if args.row_tokens >= args.split_from else {}),
        "sample_tokens": args.sample_tokens or None,
        "optim": args.optim,
        **(disk_fields(plan, found.disk, args) if plan.on_disk else {}),
    }


def disk_fields(plan: Plan, steps: Sequence[Sequence[float]], args: argparse.Namespace) -> dict[str, Any]:
    """What the disk did in each of ``steps``, the median of each number, and what it was said to do."""
    read, written, busy_s = (statistics.median(column) for column in zip(*steps, strict=True))
    rates = disk_rates(Path(args.disk_folder), int(args.disk_memory * GIB))[0]
    return {
        "disk_gib": round(plan.total("@disk") / GIB, 3),
        "disk_read_gb": significant(read / 1e9),
        "disk_written_gb": significant(written / 1e9),
        "disk_busy_s": round(busy_s, 3),
        "predicted_disk_s": None if plan.seconds is None else round(plan.seconds.disk, 3),
        "disk_gb_per_s": [significant(rate.value / 1e9) for rate in rates.values()],
    }


def split(engine: Engine, steps: Steps) -> dict[str, Any]:
    """The step's seconds in attention and in the rest. Attention is timed alone, one row of the model's heads, and counts as
    often as it runs: twice forward where its layer is computed again and it is not kept, and once backward."""
    plan, text = engine.plan, engine.skeleton.config.get_text_config()
    heads = int(text.num_attention_heads)
    shape = AttentionShape(
        tokens=steps.row_tokens,
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_size=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
    )
    forward, backward = attention_seconds(engine.backend, shape, "default", repeats=1)
    budgets = plan.layer_budgets(steps.layers)
    again = sum(budget < FREE_BUDGET or index < plan.num_rebuilt(steps.layers) for index, budget in enumerate(budgets))
    forwards = steps.layers + again - plan.kept_attention
    attention = plan.rows_per_step * (forwards * forward + steps.layers * backward)
    return {"attention_s": round(attention, 3), "rest_s": round(statistics.median(steps.seconds) - attention, 3)}


def plan_over(engine: Engine, one: argparse.Namespace, other: argparse.Namespace) -> Plan | None:
    """The plan of ``other`` where the store of ``one`` serves it: the same shape and format, planes in the same places. A
    planner that may choose those sees the store's bytes as taken, unless ``--host-memory`` says what there is."""
    names = ("model", "layers", "width", "vocab", "device", "optim", "master_weights", "on_arrival")
    if any(getattr(one, name) != getattr(other, name) for name in names):
        return None
    plan = plan_of(other, engine.backend.name == "cuda")
    if other.auto:
        config = config_for(other, other.model)
        plan = choose_for(engine.skeleton, engine.optimizer, config, engine.backend, row_tokens=other.row_tokens)
    places = ("on_device", "on_disk", "carry_fp32")
    return plan if all(getattr(plan, name) == getattr(engine.plan, name) for name in places) else None


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.manual_seed(0)
    told = Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        measure_all(args, told)
    finally:
        signal.signal(signal.SIGTERM, before)


def measure_all(args: argparse.Namespace, told: Event) -> None:
    engine: Engine | None = None
    previous, resident = args, 0
    for number, variant in enumerate(variants(args)):
        if engine is None or not replanned(engine, previous, variant):
            engine = None
            gc.collect()
            engine, resident = build(variant)
        previous = variant
        emit(variant, measure(engine, variant, resident, told))
        if told.is_set():
            break
        if args.timeline and number == 0:
            timeline(engine, variant, Path(args.timeline))
        if args.profile and number == 0:
            profile(engine, batches_for(engine, variant), args.profile)
    if engine is not None:
        engine.close()


def replanned(engine: Engine, previous: argparse.Namespace, variant: argparse.Namespace) -> bool:
    """Whether ``engine`` goes on as that of ``variant``, over its store; else it is closed."""
    engine.settle()
    engine.backend.limit_memory(None)
    plan = plan_over(engine, previous, variant)
    if plan is None:
        engine.close()
        return False
    engine.replan(plan)
    engine.backend.limit_memory(config_for(variant, variant.model).engine.device_memory)
    return True


def timeline(engine: Engine, args: argparse.Namespace, folder: Path) -> None:
    """Two steps, the second recorded, so that it shows the first one's updates in its forward."""
    from layerferry.trainer.timeline import picture, trace

    batches = batches_for(engine, args)
    engine.step(batches, lr=1e-5)
    engine.clock.start_recording()
    report = engine.step(batches, lr=1e-5)
    spans = engine.clock.stop_recording()
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{args.model}: one step of {report.num_tokens} tokens, {report.seconds:.2f} s"
    (folder / "timeline.json").write_bytes(trace(spans))
    (folder / "timeline.png").write_bytes(picture(spans, title=title))


def profile(engine: Engine, batches: list[MicroBatch], path: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    on_cuda = isinstance(engine.backend, CudaBackend)
    with record(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
        engine.step(batches, lr=1e-5)
        engine.settle()
        engine.backend.synchronize()
    longest = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
    Path(path).write_text(profiler.key_averages().table(sort_by=longest, row_limit=45, max_name_column_width=90))


if __name__ == "__main__":
    main()
