"""Studies: step.py over one quantity at a time, as rows named after it.

    python benchmarks/sweep.py depth --model qwen2.5-7b --activation-budget 0 --out benchmarks/results/sweep.jsonl

- ``length``: rows of 1k to 32k tokens, the same tokens a step (``--tokens``) and a micro-batch (``--micro-batch-tokens``).
  FLOPs a token grow with the length, for causal attention is counted.
- ``depth``: 8 to 32 layers of the same width. Device memory may grow by kept inputs only.
- ``width``: 1.0 to 3.5 times the hidden size, the heads and the MLP, with 2 layers and a vocabulary of 32k: what is left of a
  host with 128 GiB at the last point.
- ``ablation``: one thing is taken away from the base row at a time: the upload ahead of its use (one slot: the next layer's
  upload begins when the layer before has been computed; two: it runs during that), the second slab (a gradient waits for the
  one before to have left), the deferral (every step waits for its own updates), the compiler; and other shares of
  activations kept. Layers' inputs are always kept here: there is no interval to vary as in systems that keep every K-th.
  Slots and slabs cost what their traffic costs, which at 131k tokens a step is little: use fewer (``--tokens``) to see it.

What is not said here is passed to step.py: ``python benchmarks/step.py --help``. Points of one depth and width share a store.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import step
from rows import numbers

Variant = dict[str, str | int | float]

LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
DEPTHS = [8, 16, 24, 32]
WIDTHS = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]


def length(args: argparse.Namespace) -> list[Variant]:
    return [
        {"row_tokens": at, "rows": args.tokens // at, "micro_batch_rows": max(1, args.micro_batch_tokens // at), "case": f"{at}"}
        for at in args.at or LENGTHS
    ]


def depth(args: argparse.Namespace) -> list[Variant]:
    return [{**_rows(args), "layers": int(at), "case": f"{int(at)}"} for at in args.at or DEPTHS]


def width(args: argparse.Namespace) -> list[Variant]:
    few: Variant = {"layers": 2, "vocab": 32768}
    return [{"width": at, "case": f"{at:g}"} | few | _rows(args) for at in args.at or WIDTHS]


def ablation(args: argparse.Namespace) -> list[Variant]:
    changes: list[Variant] = [
        {"case": "base"},
        {"case": "two-slots", "num_slots": 2},
        {"case": "one-slot", "num_slots": 1},
        {"case": "one-slab", "num_slabs": 1},
        {"case": "one-slot-one-slab", "num_slots": 1, "num_slabs": 1},
        {"case": "not-deferred", "settle": 1},
        {"case": "none-of-these", "num_slots": 1, "num_slabs": 1, "settle": 1},
        {"case": "keep-a-tenth", "activation_budget": 0.1},
        {"case": "keep-half", "activation_budget": 0.5},
        {"case": "eager", "compile": 0},
    ]
    return [change | _rows(args) for change in changes]


def _rows(args: argparse.Namespace) -> Variant:
    row_tokens = args.row_tokens
    return {
        "rows": args.tokens // row_tokens,
        "row_tokens": row_tokens,
        "micro_batch_rows": max(1, args.micro_batch_tokens // row_tokens),
    }


STUDIES: dict[str, Callable[[argparse.Namespace], list[Variant]]] = {
    "length": length,
    "depth": depth,
    "width": width,
    "ablation": ablation,
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--at", type=numbers(float), default=None, help="other points than the study's own")
    parser.add_argument("--tokens", type=int, default=131072, help="a step")
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--row-tokens", type=int, default=1024, help="where the length is not what varies")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args, others = parser().parse_known_args(argv)
    if args.at is not None and args.study == "length":
        args.at = [int(at) for at in args.at]
    points = STUDIES[args.study](args)
    label = f"{args.study}-{args.tokens // 1024}k"
    step.main(["--points", ";".join(_written(point, label) for point in points), *others])


def _written(point: Variant, label: str) -> str:
    named = point | {"case": f"{label}-{point['case']}"}
    return ",".join(f"{name}={value}" for name, value in named.items())


if __name__ == "__main__":
    main()
