"""Head and loss of a shape, with their gradients: the fused path and the reference, by tokens whose logits exist at once.

    python benchmarks/head.py --model qwen2.5-7b --rows 32 --row-tokens 1024 --chunk-tokens 2048,4096,8192,16384

The FLOPs are those of the three matrix products, 6 * tokens * D * V; peak bytes are what the call needs on top of hidden
states, weights and the fp32 accumulator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rows import common, emit, is_done, numbers, options, random_batches, significant, timed
from scratch import bind, skeleton_of, slot_for, sums_for

from layerferry.backends import Backend, make
from layerferry.models.skeleton import Skeleton
from layerferry.objectives import CrossEntropy, Head
from layerferry.objectives.fused_linear import FusedLinear
from layerferry.plan import GIB


def peak_bytes(backend: Backend, work: Callable[[], Any]) -> int:
    """What ``work`` allocates at the most; 0 where the backend does not count."""
    backend.synchronize()
    before = backend.allocated_bytes()
    backend.reset_peak()
    work()
    backend.synchronize()
    return backend.peak_bytes() - before


class HeadOf:
    """The epilogue of a skeleton over scratch memory, and one micro-batch of hidden states."""

    def __init__(self, skeleton: Skeleton, backend: Backend, *, rows: int, row_tokens: int) -> None:
        self._skeleton, self._backend, unit = skeleton, backend, skeleton.epilogue_unit
        self._parameters = bind(skeleton, unit, slot_for(unit, backend))
        self._sums = sums_for(unit, backend)
        vocab = skeleton.vocab_size
        [self._batch] = random_batches(rows=rows, row_tokens=row_tokens, micro_batch_rows=rows, vocab_size=vocab)
        self._hidden = torch.randn(rows, row_tokens, skeleton.hidden_size, device=backend.device, dtype=torch.bfloat16)
        self.num_targets = self._batch.num_targets

    def head(self, chunk_tokens: int) -> Head:
        return Head(self._skeleton, self._parameters, self._sums, chunk_tokens)

    def has_fused(self) -> bool:
        return FusedLinear.of(self.head(16), self._hidden.flatten(0, 1)[:16]) is not None

    def step(self, objective: CrossEntropy, chunk_tokens: int) -> torch.Tensor:
        """Loss [] fp32 @device; gradients go to the accumulator and to a tensor of hidden size."""
        with self._backend.computing():
            return objective.step(self.head(chunk_tokens), self._hidden, self._batch, float(self.num_targets))[0]


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--model", default="tiny", help="a shape of shapes.py")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument("--chunk-tokens", type=numbers(int), default=[64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.manual_seed(0)
    backend = make(args.device)
    skeleton = skeleton_of(args.model, backend)
    head = HeadOf(skeleton, backend, rows=args.rows, row_tokens=args.row_tokens)
    if not head.has_fused():
        sys.exit(f"{args.model}: its head has no fused form")
    flops = 6.0 * head.num_targets * skeleton.hidden_size * skeleton.vocab_size
    for path, objective in (("fused", CrossEntropy(fused=True)), ("reference", CrossEntropy(fused=False))):
        for chunk_tokens in args.chunk_tokens:
            case = f"head-{args.model}-{path}-{chunk_tokens}"
            if is_done(args, case):
                continue

            def work(objective: CrossEntropy = objective, chunk_tokens: int = chunk_tokens) -> torch.Tensor:
                return head.step(objective, chunk_tokens)

            loss = float(work())  # compiles
            best = min(timed(backend, work, repeats=args.repeats))
            found = {
                "benchmark": "head",
                "case": case,
                "model": args.model,
                "path": path,
                "tokens": head.num_targets,
                "hidden_size": skeleton.hidden_size,
                "vocab_size": skeleton.vocab_size,
                "chunk_tokens": chunk_tokens,
                "loss": round(loss, 5),
                "seconds": round(best, 6),
                "model_tflops": significant(flops / best / 1e12),
                "call_peak_gib": round(peak_bytes(backend, work) / GIB, 3),
            }
            emit(args, {**found, **common(backend, args)})


if __name__ == "__main__":
    main()
