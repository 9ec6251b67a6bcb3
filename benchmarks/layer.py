"""The roof: one layer of a shape, forward and backward with gradient accumulation, and nothing else.

    python benchmarks/layer.py --model qwen2.5-7b --micro-batch-rows 8,16,32 --budgets 0,0.1,0.3,0.5,0.7,1

A training step whose every second went into layers would run at this rate. The layer goes through the engine's tape and
templates, and its backward through another slot than its forward, so that saved weights are resolved as they are in
training; several micro-batches add into one fp32 accumulator. Kept bytes are what lies on the device between forward and
backward, a token: null where the backend does not count.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from typing import Any

import torch
from rows import common, emit, is_done, numbers, options, significant, timed
from scratch import first_layer_inputs, skeleton_of, slot_for, sums_for

from layerferry.backends import Backend, make
from layerferry.engine.compiled import preparer
from layerferry.engine.tape import SideGradients, Tape, rebuilt
from layerferry.engine.templates import Templates
from layerferry.models.skeleton import Skeleton
from layerferry.plan import GIB, Plan
from layerferry.planner.flops import Flops


class Layer:
    """The first layer of a skeleton in two slots: ``forward`` fills the tape in one, ``backward`` empties it in the other."""

    def __init__(self, skeleton: Skeleton, backend: Backend, plan: Plan, *, micro_batches: int) -> None:
        self._unit, self._backend, self._numbers = skeleton.layer_units[0], backend, range(micro_batches)
        rows, row_tokens = plan.micro_batch_rows, plan.row_tokens
        self._hidden, self._call = first_layer_inputs(skeleton, backend, rows=rows, row_tokens=row_tokens)
        self._gradient = torch.randn_like(self._hidden)
        self._slots = [slot_for(self._unit, backend) for _ in range(2)]
        self.sums = sums_for(self._unit, backend)
        layers = skeleton.layer_units
        self._templates = Templates(skeleton, preparer(plan, skeleton.hidden_size), plan.layer_budgets(len(layers)), layers)
        self._tape = Tape(self._slots, rebuilt=rebuilt(skeleton.layer_units, plan), audit=False)

    def forward(self) -> None:
        with self._backend.computing(), self._tape.record(self._unit, self._slots[0]):
            template = self._templates.bound(0, self._slots[0])
            for number in self._numbers:
                self._tape.forward(self._unit, number, template, self._hidden, self._call)

    def backward(self) -> None:
        self.sums.buffer.zero_()
        with self._backend.computing(), self._tape.resolving(self._unit, self._slots[1]):
            template = self._templates.bound(0, self._slots[1])
            for number in self._numbers:
                self._tape.backward(self._unit, number, template, [self._gradient], self.sums, SideGradients())

    def turn(self) -> None:
        self.forward()
        self.backward()

    def kept_bytes(self) -> int:
        """Bytes that a forward leaves; 0 where the backend does not count."""
        before = self._backend.allocated_bytes()
        self.forward()
        kept = self._backend.allocated_bytes() - before
        self.backward()
        return kept


def row(skeleton: Skeleton, backend: Backend, args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    tokens = args.micro_batches * plan.micro_batch_rows * plan.row_tokens
    torch.compiler.reset()  # the compiler gives up on a function that it has compiled for eight shapes or budgets
    gc.collect()
    layer = Layer(skeleton, backend, plan, micro_batches=args.micro_batches)
    layer.turn()  # compiles
    backend.reset_peak()
    best = min(timed(backend, layer.turn, repeats=args.repeats))
    kept = layer.kept_bytes()
    flops = Flops.of(skeleton)
    per_token = flops.per_token(plan.row_tokens) - 6.0 * flops.head_params
    return {
        "row_tokens": plan.row_tokens,
        "micro_batch_rows": plan.micro_batch_rows,
        "micro_batches": args.micro_batches,
        "activation_budget": plan.activation_budget,
        "compile": plan.compile,
        "seconds": round(best, 6),
        "model_tflops": significant(per_token * tokens / best / 1e12),
        "kept_bytes_per_token": round(kept / tokens, 1) if kept else None,
        "device_peak_gib": round(backend.peak_bytes() / GIB, 3),
    }


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--model", default="tiny", help="a shape of shapes.py")
    parser.add_argument("--row-tokens", type=numbers(int), default=[128])
    parser.add_argument("--micro-batch-rows", type=numbers(int), default=[2])
    parser.add_argument("--budgets", type=numbers(float), default=[0.0, 1.0], help="shares of activations kept")
    parser.add_argument("--micro-batches", type=int, default=4, help="that add into one accumulator")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.manual_seed(0)
    backend = make(args.device)
    skeleton = skeleton_of(args.model, backend)
    for budget in args.budgets:
        for row_tokens in args.row_tokens:
            for rows in args.micro_batch_rows:
                plan = Plan(
                    micro_batch_rows=rows,
                    row_tokens=row_tokens,
                    activation_budget=budget,
                    compile=backend.name == "cuda" and not args.no_compile,
                )
                case = f"layer-{args.model}-{rows}x{row_tokens}-budget-{budget:g}"
                if not is_done(args, case):
                    found = row(skeleton, backend, args, plan)
                    emit(args, {"benchmark": "layer", "case": case, "model": args.model, **found, **common(backend, args)})


if __name__ == "__main__":
    main()
