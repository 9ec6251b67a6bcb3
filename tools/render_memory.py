"""Writes docs/memory.md from the planner: bytes of well-known models, from their shapes alone.

    python tools/render_memory.py [--check]

``--check`` writes nothing and fails where the page is not what the planner says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerferry.config import OptimConfig
from layerferry.layout import GRAD, RESIDUE, WEIGHT
from layerferry.models.build import build_on_meta
from layerferry.models.skeleton import Skeleton
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import EXP_AVG, EXP_AVG_SQ
from layerferry.optim.choose import optimizer_for
from layerferry.optim.decay import decays
from layerferry.optim.reference import ReferenceKernels
from layerferry.plan import GIB, Plan
from layerferry.planner.facts import Model
from layerferry.planner.held import DEVICE, arrival_bytes, planes, unit_bytes
from layerferry.planner.memory import items
from layerferry.planner.working import Shape
from layerferry.store.store import plane_specs

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
ROW_TOKENS, ROWS, MICRO_BATCH_ROWS = 1024, 128, 16

_MOE = {"moe_intermediate_size": 768, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, tuple[Any, ...]] = {
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 152064, False),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False),
    "Qwen2.5-72B": ("qwen2", 8192, 29568, 80, 64, 8, 152064, False),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "Qwen3-30B-A3B": ("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, False, _MOE),
}
"""Published shapes: type, hidden, intermediate, layers, heads, key-value heads, vocabulary, tied, the rest."""
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)

HEAD = """# Memory

This page is written by `tools/render_memory.py` from the planner, and a test holds the planner to the bytes that are
really allocated. `layerferry plan CONFIG.yaml` prints the same for your model, rows and machine.

## Host: 14 bytes a parameter

Everything that outlives a step is in host memory, in one flat vector (a *plane*) per kind and unit. A parameter's fp32
master is two planes: the upper half is the bf16 weight that is uploaded, the lower half its remainder.

| plane | bytes a parameter |
|---|---|
| weight (bf16, upper half of the master; pinned) | 2 |
| residue (int16, lower half of the master) | 2 |
| gradient (bf16; pinned) | 2 |
| exp_avg (fp32) | 4 |
| exp_avg_sq (fp32) | 4 |
| **all** | **14** |

Several waves can carry the gradient in fp32 (`carry_fp32`): 16 bytes. A unit that lives on the device keeps the same planes
there, with a gradient of 4 bytes. Padding (every parameter starts at a multiple of 256 bytes) is in the numbers below.

"""
DEVICE_TEXT = f"""
## Device: a few layers and what is kept of the activations

{ROWS} rows of {ROW_TOKENS} tokens a step in micro-batches of {MICRO_BATCH_ROWS} rows, everything streamed in one wave,
compiled layers, activation budget 0 (inputs only). Buffers are exact: three layer slots, two slabs, a slot and a slab for
embedding and head, and fp32 accumulators. Activations are the planner's estimate; on a device they are measured before the
plan is made.

"""


FORMATS = {
    "`optim: adamw_torch` (default)": OptimConfig(),
    "`optim: adamw_8bit` or `paged_adamw_8bit`, `adamw_bnb_8bit`": OptimConfig(optim="adamw_8bit"),
    "`optim: adamw_8bit`, `master_weights: fp32`": OptimConfig(optim="adamw_8bit", master_weights="fp32"),
    "`optim: adamw_8bit`, `master_weights: bf16`": OptimConfig(optim="adamw_8bit", master_weights="bf16"),
    "`optim: adamw_torch`, `master_weights: bf16`": OptimConfig(master_weights="bf16"),
    "`optim: lion_32bit`": OptimConfig(optim="lion_32bit"),
    "`optim: lion_8bit`": OptimConfig(optim="lion_8bit"),
    "`optim: muon` (of matrices; the rest has 8-bit AdamW)": OptimConfig(optim="muon"),
    "`optim: muon_8bit`": OptimConfig(optim="muon_8bit"),
    "`optim: sgd`, `optim_args: momentum=0.9`": OptimConfig(optim="sgd", momentum=0.9),
    "`optim: adafactor`": OptimConfig(optim="adafactor"),
    "`optim: sgd`": OptimConfig(optim="sgd"),
}
"""Words of a configuration -> what they ask for."""
ARRIVING = {
    "`update_on_arrival: true`": OptimConfig(),
    "`optim: adamw_8bit`, `update_on_arrival: true`": OptimConfig(optim="adamw_8bit"),
}
"""The same where gradients have a few buffers and no planes."""
FORMAT_MODELS = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")
FORMATS_TEXT = """### Other formats of the state

What is kept in fewer bits is rounded stochastically, so that small updates are not lost
([decision 15](decisions/0015-optimizer-formats.md)); 8-bit moments have one exponent byte per 128 numbers. Bytes a parameter, and
GiB @host of whole models:

"""


def format_rows(names: Sequence[str]) -> list[str]:
    """The table of formats for these models; bytes a parameter are the first one's."""
    titles = ("configuration", "weight", "residue", "gradient", "moments", "B/param", *names)
    models = [Model.of(skeleton(name)) for name in names]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for words, config in (FORMATS | ARRIVING).items():
        specs = plane_specs(optimizer_for(config).state_planes)
        held = [{kind: sum(unit_bytes(model, spec)) for kind, spec in specs.items()} for model in models]
        if words in ARRIVING:
            held = [{**own, GRAD: arrival_bytes(model, specs[GRAD], ())} for own, model in zip(held, models, strict=True)]
        first, params = held[0], models[0].num_params
        moments = sum(num_bytes for kind, num_bytes in first.items() if kind not in (WEIGHT, RESIDUE, GRAD))
        parts = [first[WEIGHT], first[RESIDUE], first[GRAD], moments, sum(first.values())]
        cells = [words, *(f"{part / params:.2f}".removesuffix(".00") for part in parts)]
        cells += [f"{sum(each.values()) / GIB:.1f}" for each in held]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


DISK_TEXT = """
### State on a disk

`disk_memory: 200GiB` lets residue and moments of units for which neither host nor device has room live on a disk
([decision 17](decisions/0017-disk-tier.md)). The planner puts as few there as it must; with all of them there the host keeps
weights, gradients (or the buffers that they arrive in) and three buffers as large as the largest unit's state. GiB @host and
@disk; the latter is read and written once every step:

"""


def disk_rows(names: Sequence[str]) -> list[str]:
    """The table of what is left @host where the state of every unit is @disk."""
    lines = [f"| configuration | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    for words, config in (FORMATS | ARRIVING).items():
        if "adamw" not in words + config.optim or "master_weights" in words:
            continue
        specs, cells = plane_specs(optimizer_for(config).state_planes), []
        for model in (Model.of(skeleton(name)) for name in names):
            every = frozenset(unit.index for unit in model.units)
            table = planes(model, specs, frozenset(), every, keeps_gradients=words not in ARRIVING)
            host, disk = (sum(item.num_bytes for item in table if item.place == place) for place in ("@host", "@disk"))
            host += arrival_bytes(model, specs[GRAD], ()) if words in ARRIVING else 0
            cells.append(f"{host / GIB:.1f} and {disk / GIB:.1f}")
        lines.append(f"| {' | '.join([words.removesuffix(' (default)'), *cells])} |")
    return lines


TITLES = (
    "model",
    "parameters",
    "host GiB",
    "weights",
    "residues",
    "gradients",
    "moments",
    "B/param",
    "device buffers GiB",
    "kept",
    "working set",
    "device GiB",
)


def row(name: str) -> str:
    """One model's line of the table."""
    specs = plane_specs(AdamW(kernels=ReferenceKernels()).state_planes)
    plan = Plan(compile=True, activation_budget=0.0, micro_batch_rows=MICRO_BATCH_ROWS, rows_per_step=ROWS, row_tokens=ROW_TOKENS)
    model = Model.of(skeleton(name))
    held = {plane: sum(unit_bytes(model, spec)) for plane, spec in specs.items()}
    shape = Shape(row_tokens=ROW_TOKENS, rows_per_step=ROWS, fused_head=True)
    device = {item.what: item.num_bytes for item in items(model, specs, plan, shape) if item.place == DEVICE}
    buffers = sum(n for what, n in device.items() if any(word in what for word in ("slot", "slab", "accumulators")))
    working = sum(n for what, n in device.items() if what.startswith("working set"))
    total, host = sum(device.values()), sum(held.values())
    state = [host, held[WEIGHT], held[RESIDUE], held[GRAD], held[EXP_AVG] + held[EXP_AVG_SQ]]
    cells = [name, f"{model.num_params / 1e9:.2f}B", *(f"{n / GIB:.1f}" for n in state), f"{host / model.num_params:.2f}"]
    cells += [f"{n / GIB:.1f}" for n in (buffers, total - buffers - working, working, total)]
    return f"| {' | '.join(cells)} |"


def skeleton(name: str) -> Skeleton:
    return of_shape(MODELS[name])


def of_shape(shape: tuple[Any, ...]) -> Skeleton:
    """A model of a published shape on ``meta``."""
    from transformers import CONFIG_MAPPING

    kind, *values = shape
    sizes = dict(zip(FIELDS, values, strict=False)) | (values[-1] if isinstance(values[-1], dict) else {})
    attention = None if kind == "gpt_oss" else "sdpa"  # its sinks need its own
    model = build_on_meta(CONFIG_MAPPING[kind](**sizes), dtype=torch.bfloat16, attention=attention)
    return Skeleton(model, decays=decays, device=torch.device("cpu"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    lines = [f"| {' | '.join(TITLES)} |", "|" + "---|" * len(TITLES), *map(row, MODELS)]
    formats = "\n".join(format_rows(FORMAT_MODELS)) + "\n"
    disk = "\n".join(disk_rows(FORMAT_MODELS)) + "\n"
    page = HEAD + FORMATS_TEXT + formats + DISK_TEXT + disk + DEVICE_TEXT + "\n".join(lines) + "\n"
    if not parser.parse_args().check:
        PAGE.write_text(page)
        return 0
    if PAGE.read_text() != page:
        print(f"{PAGE} is not what the planner says: run tools/render_memory.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
