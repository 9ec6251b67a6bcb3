"""The same model on the same data under several optimizer formats, beside plain fp32 autograd: loss curves, and the gaps between.

The baseline is nothing of ours but the data: the whole model in fp32, autograd, ``torch.optim``, ``clip_grad_norm_``. The format
``plain-bf16`` is that once more with weights and gradients in bf16 over fp32 masters: what bf16 costs without us. Every format
starts from the same weights and gets the same micro-batches and learning rates (warm-up over a tenth, then cosine to a tenth).
One JSON row a format on stdout; with ``--plot``, a picture of all curves.

The gap is between mean losses over the last sixth of the steps, as a share of the baseline's. Both curves see the same batches,
so the noise that is stated is that of the paired differences: two standard errors of their mean. A format that computes in bf16
(all but ``--fp32``) has bf16's noise in its gap too: ``adamw_torch`` is to be compared with ``plain-bf16``, and the leaner
formats with it.

    python benchmarks/curves.py --text book.txt --steps 300 --plot curves.png              tiny model of bytes, on a CPU
    python benchmarks/curves.py --model SmolLM2-135M --text book.txt --rows 16 --row-tokens 512 --device cuda
    python benchmarks/curves.py --shape smollm2-135m --ids ids.npy --device cuda            random weights, ready token ids

``--text`` is read as bytes, or through the model folder's tokenizer; ``--ids`` is a NumPy file of token ids; without either the
text is the project's own documentation.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import common, emit, is_done, options, say
from shapes import config_of
from torch import Tensor, nn

import layerferry
from layerferry.backends import Backend, make
from layerferry.config import Config, EngineConfig, ModelConfig, OptimConfig, TrainConfig
from layerferry.engine.batch import MicroBatch
from layerferry.optim.decay import decays
from layerferry.store.store import plane_specs

DOCUMENTS = Path(__file__).parents[1] / "docs"
FORMATS: dict[str, dict[str, Any]] = {
    "adamw_torch": {},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "adamw_8bit-fp32": {"optim": "adamw_8bit", "master_weights": "fp32"},
    "adamw-24bit": {"master_weights": "24bit"},
    "adamw-bf16": {"master_weights": "bf16"},
    "adamw_8bit-bf16": {"optim": "adamw_8bit", "master_weights": "bf16"},
    "lion": {"optim": "lion_32bit"},
    "lion_8bit": {"optim": "lion_8bit"},
    "adafactor": {"optim": "adafactor"},
    "muon": {"optim": "muon"},
    "muon_8bit": {"optim": "muon_8bit"},
    "sgd": {"optim": "sgd", "momentum": 0.9},
}
"""Name → fields of ``OptimConfig``."""
LR_FACTOR = {"lion": 0.3, "lion_8bit": 0.3, "sgd": 10.0}
"""Of the learning rate, by rule. Lion's paper advises a third to a tenth; SGD's has another unit."""
BASELINE = "plain-fp32"
PLAIN_BF16 = "plain-bf16"
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
WARMUP_SHARE, LAST_SHARE, LOWEST = 0.1, 1 / 6, 0.1


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Of step ``step``, counted from 0."""
    warmup = max(1, int(WARMUP_SHARE * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done)))


# ---------------------------------------------------------------- data and model


def token_ids(args: argparse.Namespace) -> Tensor:
    """The whole text as ids, [tokens] int64."""
    if args.ids:
        return torch.from_numpy(np.load(args.ids).astype(np.int64))
    if args.text:
        text = Path(args.text).read_text(encoding="utf-8", errors="replace")
    else:
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.rglob("*.md")))
    if args.model:
        from transformers import AutoTokenizer

        return torch.tensor(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def step_batches(ids: Tensor, args: argparse.Namespace) -> list[list[MicroBatch]]:
    """The micro-batches of every step: rows cut from the text at random places, the same for every run."""
    generator = torch.Generator().manual_seed(args.seed)
    lengths = torch.full((args.micro_batch_rows,), args.row_tokens)

    def batch() -> MicroBatch:
        starts = torch.randint(0, len(ids) - args.row_tokens, (args.micro_batch_rows,), generator=generator)
        rows = torch.stack([ids[start : start + args.row_tokens] for start in starts.tolist()])
        return MicroBatch(input_ids=rows, labels=rows.clone(), lengths=lengths)

    return [[batch() for _ in range(args.rows // args.micro_batch_rows)] for _ in range(args.steps)]


def model_of(args: argparse.Namespace) -> Any:
    """fp32 weights @host: a folder's, or random ones of a shape."""
    from transformers import AutoModelForCausalLM

    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").train()
    torch.manual_seed(args.seed)
    config = config_of(args.shape, layers=None)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()


# ---------------------------------------------------------------- runs


def plain(name: str, model: Any, steps: list[list[MicroBatch]], backend: Backend, args: argparse.Namespace) -> list[float]:
    """Losses of plain autograd over the whole model, with torch's own AdamW on fp32 masters: the weights themselves, or where
    the model is bf16 copies of them."""
    model = copy.deepcopy(model).to(backend.device)
    masters = {parameter: parameter for parameter in model.parameters()}
    if name == PLAIN_BF16:
        masters = {parameter: nn.Parameter(parameter.detach().clone()) for parameter in masters}
        model.bfloat16()
    owner = {
        f"{name}.{own}".lstrip("."): type(m).__name__
        for name, m in model.named_modules()
        for own, _ in m.named_parameters(recurse=False)
    }
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for own, parameter in model.named_parameters():
        groups[decays(own, owner[own])].append(masters[parameter])
    optimizer = torch.optim.AdamW(
        [{"params": of, "weight_decay": WEIGHT_DECAY * decayed} for decayed, of in groups.items() if of], betas=BETAS
    )
    losses = []
    for number, batches in enumerate(steps):
        total, denominator = 0.0, sum(batch.num_targets for batch in batches)
        for batch in batches:
            ids = batch.input_ids.to(backend.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum") / denominator
            torch.autograd.backward(loss)
            total += loss.item()
        for parameter, master in masters.items():
            if master is not parameter:
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(list(masters.values()), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, args.steps, args.lr)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in masters.items():
                if master is not parameter:
                    parameter.copy_(master)
        losses.append(total)
        if number % args.say_every == 0:
            say(f"{name} step {number}: {total:.4f}")
    return losses


def ferried(
    name: str, model: Any, steps: list[list[MicroBatch]], backend: Backend, args: argparse.Namespace
) -> tuple[list[float], float]:
    """Losses of the engine with the optimizer ``name``, and its bytes a parameter."""
    config = Config(
        model=ModelConfig(model_name_or_path="curves"),
        optim=OptimConfig(
            weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], max_grad_norm=MAX_GRAD_NORM, **FORMATS[name]
        ),
        train=TrainConfig(
            fp32=args.fp32,
            seed=args.seed,
            per_device_train_batch_size=args.micro_batch_rows,
            gradient_accumulation_steps=args.rows // args.micro_batch_rows,
        ),
        engine=EngineConfig(device=args.device, micro_batch_rows=args.micro_batch_rows),
    )
    engine = layerferry.load(model, config=config, backend=backend, row_tokens=args.row_tokens)
    losses = []
    for number, batches in enumerate(steps):
        lr = learning_rate(number, args.steps, args.lr) * LR_FACTOR.get(name, 1.0)
        losses.append(engine.step(batches, lr=lr).loss)
        if number % args.say_every == 0:
            say(f"{name} step {number}: {losses[-1]:.4f}")
    engine.settle()
    specs = plane_specs(engine.optimizer.state_planes)
    held = sum(unit.layout.bytes(spec) for unit in engine.store.units for spec in specs.values()) / engine.num_params
    engine.close()
    return losses, held


# ---------------------------------------------------------------- comparing


def gap(losses: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """(gap, noise) as shares of the baseline's final loss: means over the last steps, and two standard errors of their paired
    difference."""
    count = max(2, round(LAST_SHARE * len(baseline)))
    ours, theirs = (np.asarray(each[-count:], dtype=np.float64) for each in (losses, baseline))
    difference = ours - theirs
    error = float(difference.std(ddof=1) / math.sqrt(count))
    return float(difference.mean() / theirs.mean()), 2 * error / float(theirs.mean())


def plot(curves: dict[str, list[float]], path: Path, title: str) -> None:
    """All curves, smoothed over a fiftieth of the steps; on the right, how far each is from the baseline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(12, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    baseline = next(iter(curves.values()))
    width = max(1, len(baseline) // 50)
    window = np.ones(width) / width
    for name, losses in curves.items():
        smooth = np.convolve(losses, window, mode="valid")
        left.plot(smooth, linewidth=1.2, label=name)
        right.plot(100 * (smooth / np.convolve(baseline, window, mode="valid") - 1), linewidth=1.2, label=name)
    left.set(title=title, xlabel="step", ylabel="loss")
    right.set(title=f"beside {next(iter(curves))}", xlabel="step", ylabel="%")
    for axes in (left, right):
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def row(name: str, losses: list[float], baseline: list[float], args: argparse.Namespace) -> dict[str, Any]:
    share, noise = gap(losses, baseline)
    count = max(2, round(LAST_SHARE * len(losses)))
    return {
        "benchmark": "curves",
        "case": f"{args.case or args.model or args.shape}-{name}",
        "format": name,
        "steps": args.steps,
        "tokens_per_step": args.rows * args.row_tokens,
        "lr": args.lr * LR_FACTOR.get(name, 1.0),
        "compute": "fp32" if name == BASELINE or (args.fp32 and name != PLAIN_BF16) else "bf16",
        "first_loss": round(losses[0], 5),
        "final_loss": round(sum(losses[-count:]) / count, 5),
        "gap": round(share, 6),
        "noise": round(noise, 6),
        "losses": [round(loss, 4) for loss in losses],
    }


def measured_baseline(args: argparse.Namespace) -> list[float]:
    """The losses of this setting's plain fp32 run in ``--baseline``, where that is given."""
    if not args.baseline:
        return []
    wanted = row(BASELINE, [0.0, 0.0], [1.0, 1.0], args)
    same = ("case", "steps", "tokens_per_step", "lr")
    rows = map(json.loads, filter(None, Path(args.baseline).read_text().splitlines()))
    found = [one["losses"] for one in rows if all(one.get(name) == wanted[name] for name in same)]
    if not found:
        sys.exit(f"--baseline {args.baseline}: no {wanted['case']} of these steps, tokens and rate")
    losses: list[float] = found[-1]
    return losses


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("--baseline", default="", help="results that have this case's plain fp32 run, which then is not repeated")
    parser.add_argument("--model", default="", help="folder with weights and tokenizer; left out: random weights of --shape")
    parser.add_argument("--shape", default="tiny", help="a shape of shapes.py")
    parser.add_argument("--text", default="", help="a text file; left out: this project's documentation")
    parser.add_argument("--ids", default="", help="a NumPy file of token ids instead of a text")
    known = ", ".join((PLAIN_BF16, *FORMATS))
    parser.add_argument("--formats", default="plain-bf16,adamw_torch,adamw_8bit,adamw-bf16,lion,sgd", help=f"of {known}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument("--micro-batch-rows", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fp32", action="store_true", help="the engine computes in fp32 too")
    parser.add_argument("--plot", default="", help="draw the curves into this PNG")
    parser.add_argument("--say-every", type=int, default=50)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    names = args.formats.split(",")
    unknown = [name for name in names if name not in (PLAIN_BF16, *FORMATS)]
    if unknown:
        sys.exit(f"unknown formats: {unknown}; known: {', '.join((PLAIN_BF16, *FORMATS))}")
    if args.rows % args.micro_batch_rows:
        sys.exit("rows: not whole micro-batches")
    backend, model = make(args.device), model_of(args)
    steps = step_batches(token_ids(args), args)
    curves = {BASELINE: measured_baseline(args) or plain(BASELINE, model, steps, backend, args)}
    if not args.baseline:
        emit(args, {**row(BASELINE, curves[BASELINE], curves[BASELINE], args), **common(backend, args)})
    for name in names:
        if is_done(args, f"{args.case or args.model or args.shape}-{name}"):
            continue
        if name == PLAIN_BF16:
            curves[name], held = plain(name, model, steps, backend, args), None
        else:
            curves[name], held = ferried(name, model, steps, backend, args)
        kept = {} if held is None else {"bytes_per_param": round(held, 3)}
        emit(args, {**row(name, curves[name], curves[BASELINE], args), **kept, **common(backend, args)})
    if args.plot:
        plot(curves, Path(args.plot), f"{args.case or args.model or args.shape}, {args.steps} steps")


if __name__ == "__main__":
    main()
