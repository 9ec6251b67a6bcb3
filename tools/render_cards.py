"""Writes docs/cards.md: the largest model that each card trains beside each host memory, and how long a step takes; and the
README's table, which is part of it.

    python tools/render_cards.py [--check]

Every cell is a plan that the planner has made for a described machine; nothing is looked up but the cards' published numbers.
``--check`` writes nothing and fails where the page is not what the planner says (some minutes).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from render_memory import MODELS as MEMORY_MODELS
from render_memory import of_shape

from layerferry.config import Config, ModelConfig, OptimConfig, TrainConfig
from layerferry.optim.choose import optimizer_for
from layerferry.plan import GIB, Plan
from layerferry.planner.choose import decide
from layerferry.planner.facts import Model
from layerferry.planner.machine import (
    CODED_OPTIMIZER_BYTES_PER_PARAM,
    OPTIMIZER_BYTES_PER_PARAM,
    Machine,
    default_rates,
)
from layerferry.planner.problem import problem
from layerferry.planner.rate import Rate
from layerferry.store.store import plane_specs

PAGE = Path(__file__).parents[1] / "docs" / "cards.md"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- cards: tools/render_cards.py -->", "<!-- end of cards -->"
README_HOSTS = 4
"""The README shows the smaller hosts."""
ROWS_MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "step.jsonl"
ROW_TOKENS, ROWS = 1024, 128
GB = 10**9

_OSS = {"head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128}
MODELS: dict[str, tuple[Any, ...]] = {
    **MEMORY_MODELS,
    "Llama-3.1-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, False),
    "gpt-oss-120b": ("gpt_oss", 2880, 2880, 36, 64, 8, 201088, False, _OSS),
}
FORMATS = {
    "`optim: adamw_torch`: AdamW with fp32 masters and moments": OptimConfig(),
    "`optim: adamw_8bit`: 24-bit masters, 8-bit moments": OptimConfig(optim="adamw_8bit"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """``matmul``, ``link``, ``memory``: published dense bf16 FLOP/s, bytes/s of the link each way, bytes/s of device memory."""

    name: str
    gb: float
    matmul: float
    link: float
    memory: float
    free_gib: float
    """What is left for a run: the device's memory less a context."""


CARDS = (
    Card(name="RTX 3080 10 GB", gb=10, matmul=59.5e12, link=32e9, memory=760e9, free_gib=9.2),
    Card(name="RTX 4090 24 GB", gb=24, matmul=165e12, link=32e9, memory=1008e9, free_gib=23.0),
    Card(name="RTX 5090 32 GB", gb=32, matmul=209e12, link=64e9, memory=1792e9, free_gib=30.8),
    Card(name="RTX A6000 48 GB", gb=48, matmul=155e12, link=32e9, memory=768e9, free_gib=46.8),
    Card(name="A100 80 GB", gb=80, matmul=312e12, link=32e9, memory=2039e9, free_gib=78.5),
    Card(name="H100 80 GB", gb=80, matmul=989e12, link=64e9, memory=3350e9, free_gib=78.5),
    Card(name="H200 141 GB", gb=141, matmul=989e12, link=64e9, memory=4800e9, free_gib=138.8),
)
REACHED = {"matmul": 0.72, "link": 0.86, "together": 0.70, "memory": 0.87}
"""Of the published numbers: what the one card that was measured, the H200, reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """``dram``: bytes/s that the processor's memory is assumed to give."""

    gb: int
    dram: float
    cores: int

    @property
    def title(self) -> str:
        return f"{self.gb} GB" if self.gb < 1000 else f"{self.gb / 1000:g} TB"


HOSTS = (
    Host(gb=64, dram=55e9, cores=16),
    Host(gb=128, dram=55e9, cores=16),
    Host(gb=256, dram=120e9, cores=32),
    Host(gb=512, dram=200e9, cores=64),
    Host(gb=1500, dram=300e9, cores=96),
)
FREE_SHARE = 0.94
"""Of the host's memory; the rest is the system's."""

HEAD = f"""# What a card can train

The largest of the well-known models that the planner fits on a card beside a host memory, every parameter trained, and the
seconds of one step of {ROWS * ROW_TOKENS:,} tokens ({ROWS} rows of {ROW_TOKENS:,}). `layerferry plan CONFIG.yaml` says it for
your own machine, model and rows; `layerferry probe` measures your machine's rates first. Smaller steps take fewer seconds, but
less than in proportion: weights and gradients travel once a step whatever its tokens.

This page is written by `tools/render_cards.py`, and a test holds cells of it to the planner.

- **H200**: with the rates that were measured on one (marked †). **The other cards**: from the makers' published numbers for dense
  bf16 products, link and memory, at the share of them that the H200 reaches ({REACHED["matmul"]:.0%} of the products,
  {REACHED["link"]:.0%} of the link, {REACHED["memory"]:.0%} of the memory's rate). They are estimates, and so are their seconds.
- Hosts are described by their memory's rate: 55 GB/s beside 64 and 128 GB, 120 beside 256, 200 beside 512, 300 beside 1.5 TB. The
  update runs there, and hides behind the forward where it can. {FREE_SHARE:.0%} of the memory is taken to be free.
- Models: {", ".join(MODELS)}.
"""


@cache
def model_of(name: str) -> Model:
    return Model.of(of_shape(MODELS[name]))


@cache
def by_size() -> tuple[str, ...]:
    """Names, largest first."""
    return tuple(sorted(MODELS, key=lambda name: -model_of(name).num_params))


def machine_of(card: Card, host: Host) -> Machine:
    if card.name.startswith("H200"):
        rates = default_rates("H200", on_cpu=False)
    else:
        source = "published"
        rates = {
            "matmul_flops_per_s": Rate(card.matmul * REACHED["matmul"], source),
            "device_bytes_per_s": Rate(card.memory * REACHED["memory"], source),
            **dict.fromkeys(("upload_bytes_per_s", "download_bytes_per_s"), Rate(card.link * REACHED["link"], source)),
            **dict.fromkeys(
                ("upload_together_bytes_per_s", "download_together_bytes_per_s"), Rate(card.link * REACHED["together"], source)
            ),
        }
    at_host: dict[str, Any] = {
        "dram_bytes_per_s": Rate(host.dram, "assumed"),
        "optimizer_s_per_param": Rate(OPTIMIZER_BYTES_PER_PARAM / (0.6 * host.dram), "assumed"),
        "coded_optimizer_s_per_param": Rate(CODED_OPTIMIZER_BYTES_PER_PARAM / (0.6 * host.dram), "assumed"),
    }
    return Machine(
        backend="cuda",
        device_name=card.name,
        device_available=int(card.free_gib * GIB),
        device_total=int(card.gb * GB),
        device_source="described",
        host_available=int(host.gb * GB * FREE_SHARE),
        host_total=host.gb * GB,
        host_source="host_memory",
        locked_limit=None,
        cores=host.cores,
        **{**rates, **at_host},
    )


def planned(name: str, card: Card, host: Host, optim: OptimConfig) -> Plan | None:
    """The plan for one model; None where none fits."""
    specs, machine, model = plane_specs(optimizer_for(optim).state_planes), machine_of(card, host), model_of(name)
    planes = sum(unit.layout.bytes(spec) for unit in model.units for spec in specs.values())
    if planes > machine.host_available + machine.device_available:
        return None
    config = Config(
        model=ModelConfig(model_name_or_path="none"), optim=optim, train=TrainConfig(per_device_train_batch_size=ROWS)
    )
    decision = decide(problem(model, specs, machine, config, ROW_TOKENS))
    return decision.plan if decision.shortfall is None else None


def cell(card: Card, host: Host, optim: OptimConfig) -> str:
    """The largest model with a plan that fits, and its seconds."""
    for name in by_size():
        plan = planned(name, card, host, optim)
        if plan is not None and plan.seconds is not None:
            return f"{name}, {_seconds(plan.seconds.step)}"
    return "none of them"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def line(card: Card, optim: OptimConfig) -> str:
    mark = " †" if card.name.startswith("H200") else ""
    return f"| {card.name}{mark} | {' | '.join(cell(card, host, optim) for host in HOSTS)} |"


def table(optim: OptimConfig) -> Iterator[str]:
    yield f"| card | {' | '.join(host.title for host in HOSTS)} |"
    yield "|---" * (len(HOSTS) + 1) + "|"
    for card in CARDS:
        yield line(card, optim)


def measured() -> Iterator[str]:
    """Whole models at full depth whose plan was the planner's own, newest row of each case."""
    rows = [json.loads(text) for text in ROWS_MEASURED.read_text(encoding="utf-8").splitlines()]
    depth = {"qwen2.5-3b": 36, "qwen2.5-7b": 28, "qwen2.5-14b": 48, "qwen3-30b-a3b": 48}
    whole = [row for row in rows if row.get("planned_by") == "planner" and row["layers"] == depth.get(row["model"])]
    yield "| case | model | tokens a step | device GiB | host GiB | seconds a step | planned |"
    yield "|---|---|---|---|---|---|---|"
    for row in {row["case"]: row for row in whole}.values():
        yield (
            f"| `{row['case']}` | {row['model']} | {row['tokens_per_step']:,} | {row['device_peak_gib']:.1f} | "
            f"{row['host_resident_gib']:.1f} | {row['step_s']:.1f} | {row['predicted_step_s']:.1f} |"
        )


def page() -> str:
    blocks = [HEAD]
    for title, optim in FORMATS.items():
        blocks.append(f"## {title}\n\n" + "\n".join(table(optim)) + "\n")
    text = "Rows of [benchmarks/results](../benchmarks/results/step.jsonl), one H200 beside 16 cores and 128 GiB:\n\n"
    return "\n".join([*blocks, "## Measured steps\n", text + "\n".join(measured()) + "\n"])


def cells(text: str, title: str) -> dict[str, list[str]]:
    """Card -> cells of the table under ``title`` of the page."""
    lines = text.partition(f"## {title}\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].removesuffix(" †"): row[1:] for row in rows}


def short(text: str) -> str:
    """The README's table, of the page: fp32 moments, and under them 8-bit ones where those change the model."""
    own, lean = (cells(text, title) for title in FORMATS)
    lines = [
        f"| card | {' | '.join(f'{host.title} of RAM' for host in HOSTS[:README_HOSTS])} |",
        "|---" * (README_HOSTS + 1) + "|",
    ]
    for card, row in own.items():
        pairs = zip(row[:README_HOSTS], lean[card], strict=False)
        both = [one if one.split(",")[0] == other.split(",")[0] else f"{one}<br>8-bit: {other}" for one, other in pairs]
        lines.append(f"| {card} | {' | '.join(both)} |")
    return "\n".join(lines)


def readme(text: str) -> str:
    """The README with that table."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{short(text)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, text = parser.parse_args().check, page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        README.write_text(readme(text), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE} is not what the planner says: run tools/render_cards.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
