"""Causal attention alone, forward and backward, by kernel and length of a row.

    python benchmarks/attention.py --row-tokens 1024,8192,32768,131072,262144,524288 --heads 28 --kv-heads 4 --head-size 128

One row of random numbers through ``scaled_dot_product_attention`` with one backend of it allowed at a time; ``default`` is the
order that the engine asks for (``backends/cuda.py``). The FLOPs are those of two causal products forward and five backward,
4 * H * d * T^2 / 2 and 5/2 of it, which is what the kernels do; the formula of training rows counts the backward as two
forwards. A kernel that refuses the shape is left out with a line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rows import common, emit, is_done, numbers, options, significant, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from layerferry.backends import Backend, make

KERNELS = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One row of ``tokens``."""

    tokens: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def forward_flops(self) -> float:
        return 4.0 * self.heads * self.head_size * self.tokens**2 / 2


def attention_seconds(backend: Backend, shape: AttentionShape, kernel: str, *, repeats: int) -> tuple[float, float]:
    """Best seconds of (forward, backward)."""

    def random(heads: int) -> Tensor:
        size = (1, heads, shape.tokens, shape.head_size)
        return torch.randn(size, device=backend.device, dtype=torch.bfloat16).requires_grad_(True)

    query, key, value = random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)
    chosen = KERNELS[kernel]
    only: AbstractContextManager[Any] = nullcontext() if chosen is None else sdpa_kernel([chosen])
    grouped = shape.heads != shape.kv_heads
    with backend.computing(), only:
        output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        slope = torch.randn_like(output)

        def forward() -> None:
            with torch.no_grad():
                scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

        def backward() -> None:
            torch.autograd.grad(output, [query, key, value], slope, retain_graph=True)

        return min(timed(backend, forward, repeats=repeats)), min(timed(backend, backward, repeats=repeats))


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--row-tokens", type=numbers(int), default=[64])
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--kernels", default="default", help=f"of {','.join(KERNELS)}")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.manual_seed(0)
    backend = make(args.device)
    for tokens in args.row_tokens:
        shape = AttentionShape(tokens=tokens, heads=args.heads, kv_heads=args.kv_heads, head_size=args.head_size)
        for kernel in args.kernels.split(","):
            case = f"attention-{kernel}-{args.heads}x{args.kv_heads}x{args.head_size}-{tokens}"
            if is_done(args, case):
                continue
            try:
                forward, backward = attention_seconds(backend, shape, kernel, repeats=args.repeats)
            except RuntimeError as error:
                print(f"{case}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
                continue
            row = {
                "benchmark": "attention",
                "case": case,
                "kernel": kernel,
                "row_tokens": tokens,
                "forward_s": round(forward, 6),
                "backward_s": round(backward, 6),
                "forward_tflops": significant(shape.forward_flops / forward / 1e12),
                "backward_tflops": significant(2.5 * shape.forward_flops / backward / 1e12),
            }
            emit(args, {**row, **common(backend, args)})


if __name__ == "__main__":
    main()
