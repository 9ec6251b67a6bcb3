"""Writes the tables of measured rows: README.md (the chosen ones) and benchmarks/results/README.md (the latest row of every
case, the studies, the optimizer's kernels, the loss curves, and what limits them all: layer, head and link), from the .jsonl
files in benchmarks/results.

    python tools/render_results.py [--check]

``--check`` writes nothing and fails where a page is not what the rows say. Checked by ``tests/test_docs.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- rows: tools/render_results.py -->", "<!-- end of rows -->"

WHAT = {
    "7b-stream-44": "Qwen2.5-7B, everything streamed, only inputs kept",
    "7b-stream-90": "the same, and the last 12 layers turn with the head",
    "7b-adam8": "Qwen2.5-7B under 8-bit AdamW, everything streamed",
    "7b-free": "Qwen2.5-7B, as the planner likes: embedding and 19 layers on the device",
    "7b-16k": "the same with 16k tokens a step: all but the head on the device",
    "7b-24gib": "Qwen2.5-7B with 24 GiB of device memory",
    "7b-24gib-8k": "the same in rows of 8,192 tokens",
    "7b-10gib": "Qwen2.5-7B with 10 GiB of device memory",
    "7b-10gib-8k": "the same in rows of 8,192 tokens",
    "7b-muon": "Qwen2.5-7B under Muon, everything streamed, only inputs kept",
    "7b-muon-free": "the same as the planner likes: embedding and 2 layers on the device, four waves",
    "7b-128k": "Qwen2.5-7B, one sequence of 131,072 tokens",
    "7b-256k": "Qwen2.5-7B, one sequence of 262,144 tokens",
    "7b-512k": "Qwen2.5-7B under 8-bit AdamW, one sequence of 524,288 tokens",
    "14b-free": "Qwen2.5-14B, fp32 masters, as the planner likes: embedding and 17 layers on the device",
    "32b-lean": "Qwen2.5-32B, 8-bit AdamW on bf16 weights, 65,536 tokens a step: embedding and 24 layers on the device",
    "14b-adam8": "Qwen2.5-14B under 8-bit AdamW, everything streamed",
    "14b-adam8-free": "the same as the planner likes: everything streamed, and the last 34 layers turn with the head",
    "3b-disk": "Qwen2.5-3B, optimizer state of 12 layers on a disk (1.6 GB/s)",
    "3b-free": "Qwen2.5-3B, as the planner likes: everything on the device",
    "3b-resident": "Qwen2.5-3B, an ordinary training script (compiled, fused loss, fp32 masters) in the same run",
    "qwen3-30b-a3b": "24 layers of Qwen3-30B-A3B (8 of 128 experts), active parameters counted; 12 units on the device",
    "gpt-oss-120b": "3 of 36 layers of GPT-OSS-120B (4 of 128 experts), active parameters counted; all that fit",
    "gpt-oss-120b-24gib": "2 of its layers with 24 GiB of device memory: experts travel in four parts",
    "7b-packed-250": "Qwen2.5-7B, rows packed with samples of 250 tokens, kept apart",
    "7b-full-rows": "the same plan with full rows, in the same run",
}
"""The README's rows, in its order."""
COLUMNS = (
    *("case", "model", "layers", "tokens/step", "device GiB", "B/param host", "s/step", "predicted", "exposed", "TFLOP/s"),
    *("commit", "plan"),
)


STUDIES = {
    "length": """Rows of 2k to 32k tokens in the plan of `7b-stream-44`, which ran before them and is the row of 1,024.
Model-FLOPs count causal attention, whose kernels are slower than matrix products.""",
    "depth": "Layers at 7B width in the same plan. Device memory grows by kept inputs alone (0.875 GiB a layer).",
    "width": """Two layers, 1 to 3.5 times as wide as 7B's, a vocabulary of 32k, 65,536 tokens a step. Updates of the second
layer and of the head have one layer's forward to hide behind, so a sixth of the step is exposed.""",
    "ablation": """One thing is taken away from a plan of three slots and two slabs, or changed. 32,768 tokens a step, so that
copies and updates are hard to hide. `one-...` ran on another GPU, whose base took 3.78 s. Predictions are of plans with the
optimizer deferred: the planner knows no other.""",
}
"""The first word of their cases in sweep.jsonl -> what they say."""
STUDIED = ("case", "layers", "width", "tokens/row", "device GiB", "s/step", "predicted", "exposed", "tokens/s", "TFLOP/s")


def latest(name: str = "step.jsonl") -> dict[str, dict[str, Any]]:
    """Case -> its last row; old rows of kernels have none."""
    rows = [json.loads(line) for line in (RESULTS / name).read_text().splitlines() if line.strip()]
    return {row["case"]: row for row in rows if "case" in row}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a page's table."""
    return [_line(columns), "|---" * len(columns) + "|", *map(_line, rows)]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def chosen(rows: dict[str, dict[str, Any]]) -> str:
    """The README's table."""
    columns = ("case", "what", "device GiB", "host GiB", "s/step", "steps", "predicted", "tokens/s", "model-TFLOP/s")
    cells = (
        (
            *(f"`{case}`", what, f"{row['device_peak_gib']:.1f}", f"{row['host_resident_gib']:.1f}", f"{row['step_s']:.2f}"),
            *(len(row["step_s_all"]), _seconds(row.get("predicted_step_s")), f"{row['tokens_per_s']:,.0f}"),
            f"{row['model_tflops']:.1f}",
        )
        for case, what, row in ((case, what, rows[case]) for case, what in WHAT.items())
    )
    return "\n".join(table(columns, cells))


def everything(rows: dict[str, dict[str, Any]]) -> str:
    """The latest row of every case, with the plan in short."""
    lines = [
        "# Measured steps",
        "",
        "Written by `tools/render_results.py`: the latest row of every case in step.jsonl. [benchmarks/README.md](../README.md)",
        "says what the fields mean. Exposed: seconds that compute stood still for an update, and for a copy.",
        "",
    ]
    cells = (
        (
            *(f"`{case}`", row["model"], row["layers"], f"{row['tokens_per_step']:,}", f"{row['device_peak_gib']:.1f}"),
            *(f"{row['bytes_per_param']:.2f}", f"{row['step_s']:.2f}", _seconds(row.get("predicted_step_s")), _exposed(row)),
            *(f"{row['model_tflops']:.1f}", row["commit"], _plan(row)),
        )
        for case, row in sorted(rows.items())
    )
    others = (
        *(studies(latest("sweep.jsonl")), kernels(latest("adamw.jsonl")), curves(latest("curves.jsonl"))),
        *(layers(latest("layer.jsonl")), heads(latest("head.jsonl")), link(latest("link.jsonl"))),
    )
    return "\n".join([*lines, *table(COLUMNS, cells), *chain.from_iterable(others), ""])


def studies(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["", "## Studies", "", "From sweep.jsonl."]
    for study, what in STUDIES.items():
        cells = (
            (
                *(f"`{case}`", row["layers"], f"{row['hidden_size']:,}", f"{row['row_tokens']:,}"),
                *(f"{row['device_peak_gib']:.1f}", f"{row['step_s']:.2f}", _seconds(row["predicted_step_s"]), _exposed(row)),
                *(f"{row['tokens_per_s']:,.0f}", f"{row['model_tflops']:.1f}"),
            )
            for case, row in rows.items()
            if case.split("-")[0] == study
        )
        lines += ["", *what.splitlines(), "", *table(STUDIED, cells)]
    return lines


def kernels(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The optimizer's passes, each beside its ceiling."""
    lines = [
        *("", "## Optimizer kernels", ""),
        "From adamw.jsonl: one pass over planes of 100 million parameters on 16 cores. The ceiling moves AdamW's bytes in place",
        "with next to no arithmetic, in the same process, taking turns.",
        "",
    ]
    cells = (
        (
            *(row["kernel"], row["threads"], f"{row['ns_per_param']:.4f}", f"{row['gb_per_s']:.1f}"),
            f"{row['share_of_ceiling']:.1%}",
        )
        for row in rows.values()
        if "share_of_ceiling" in row
    )
    return lines + table(("kernel", "threads", "ns/param", "GB/s", "of the ceiling"), cells)


def curves(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The gap of every format beside plain fp32 on the same batches."""
    lines = [
        *("", "## Loss curves", ""),
        "From curves.jsonl: the mean loss of the last sixth of the steps, and how far it lies from plain fp32 AdamW (autograd",
        "over the whole model) on the same batches, with two standard errors of the paired differences. `plain-bf16` is plain",
        "autograd in bf16 over fp32 masters.",
        "",
    ]
    columns = ("case", "format", "B/param", "steps", "tokens/step", "highest rate", "loss", "gap", "noise")
    cells = (
        (
            *(f"`{case}`", row["format"], f"{held:.2f}" if (held := row.get("bytes_per_param")) else "", row["steps"]),
            *(f"{row['tokens_per_step']:,}", f"{row['lr']:g}", f"{row['final_loss']:.4f}"),
            *(f"{row['gap']:+.3%}", f"{row['noise']:.3%}"),
        )
        for case, row in rows.items()
    )
    return lines + table(columns, cells)


def layers(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The roof: one layer alone, by the share of its activations that is kept."""
    lines = [
        *("", "## One layer alone", ""),
        "From layer.jsonl: forward and backward of one compiled layer, weights and sums in place, nothing moved.",
        "",
    ]
    cells = (
        (
            *(f"`{case}`", f"{row['micro_batch_rows']} x {row['row_tokens']:,}", f"{row['activation_budget']:g}"),
            *(f"{row['kept_bytes_per_token']:,.0f}", f"{row['device_peak_gib']:.1f}", f"{row['model_tflops']:.1f}"),
        )
        for case, row in rows.items()
    )
    return lines + table(("case", "micro-batch", "share kept", "bytes/token kept", "device GiB", "TFLOP/s"), cells)


def heads(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Head and loss with their gradients."""
    lines = [
        *("", "## Head and loss", ""),
        "From head.jsonl: logits, loss and all gradients, fused and by reference; logits exist for one chunk at a time.",
        "",
    ]
    cells = (
        (
            *(f"`{case}`", f"{row['tokens']:,}", f"{row['vocab_size']:,}", f"{row['chunk_tokens']:,}"),
            *(f"{row['call_peak_gib']:.1f}", f"{row['model_tflops']:.1f}"),
        )
        for case, row in rows.items()
    )
    return lines + table(("case", "tokens", "vocabulary", "chunk", "GiB on top", "TFLOP/s"), cells)


def link(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Rates of copies, one line a size."""
    lines = [
        *("", "## The link", ""),
        "From link.jsonl: GB/s of uploads and downloads, alone and both at once, by the size of a copy.",
        "",
    ]
    ways = ("upload", "download", "together")
    columns = ("memory", "MiB", "upload", "download", "upload beside a download", "download beside an upload")
    found: dict[tuple[bool, float], dict[str, dict[str, Any]]] = {}
    for row in rows.values():
        found.setdefault((row["pinned"], row["chunk_mib"]), {})[row["way"]] = row
    cells = (
        (
            *("pinned" if pinned else "pageable", f"{size:g}", f"{up['upload_gb_per_s']:.1f}"),
            *(f"{down['download_gb_per_s']:.1f}", f"{both['upload_gb_per_s']:.1f}", f"{both['download_gb_per_s']:.1f}"),
        )
        for (pinned, size), way in found.items()
        for up, down, both in [[way[name] for name in ways]]
    )
    return lines + table(columns, cells)


def _exposed(row: dict[str, Any]) -> str:
    return f"{row['exposed_optimizer_s']:.2f} + {row['exposed_link_s']:.2f}" if "exposed_link_s" in row else ""


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _plan(row: dict[str, Any]) -> str:
    plan = row["plan"]
    if "num_slots" not in plan:
        return "resident baseline"
    words = [f"{plan['num_waves']} wave{'s' * (plan['num_waves'] > 1)} of {plan['micro_batch_rows']}-row micro-batches"]
    words.append(f"budget {plan['activation_budget']:g}")
    if plan.get("first_wave"):
        words[0] += f", {plan['first_wave']} of them in the first"
    if plan.get("turn_layers"):
        words.append(f"{plan['turn_layers']} layers turn")
    if plan.get("expert_parts", 1) > 1:
        words.append(f"experts in {plan['expert_parts']} parts")
    if plan.get("richer_layers"):
        words.append(f"{plan['richer_layers']} layers {plan['richer_budget']:g}")
    if plan.get("on_device"):
        words.append(f"{len(plan['on_device'])} units at home")
    if plan.get("resident_gradients"):
        words.append("gradients resident")
    elif plan["num_waves"] > 1:
        words.append(f"gradients carried in {'fp32' if plan.get('carry_fp32') else 'bf16'}")
    return ", ".join(words) + f" ({row.get('planned_by', 'hand')})"


def pages() -> dict[Path, str]:
    """Page -> what it should be."""
    rows = latest()
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return {
        readme: f"{before}{BEGIN}\n{chosen(rows)}\n{END}{after}",
        ROOT / "benchmarks" / "results" / "README.md": everything(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for page, text in pages().items():
        if check and (not page.is_file() or page.read_text() != text):
            sys.exit(f"{page.relative_to(ROOT)} is not what the rows say: python tools/render_results.py")
        if not check:
            page.write_text(text)


if __name__ == "__main__":
    main()
