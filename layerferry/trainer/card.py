"""README.md of a trained model: what it was trained from, on what, how, and with which result.

The front matter is what the Hugging Face hub reads; the keys are those that LLaMA-Factory writes. Checked by
``tests/trainer/test_card.py``.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from layerferry.config import Config, OptimConfig
from layerferry.optim.choose import chosen
from layerferry.optim.formats import StateFormat
from layerferry.optim.muon import DEFAULT_MOMENTUM
from layerferry.trainer.history import Entry
from layerferry.version import VERSION

CARD = "README.md"
PACKAGES = ("transformers", "torch", "tokenizers")


def model_card(config: Config, *, entries: list[Entry], total_steps: int, num_params: int, num_trained: int) -> str:
    """The text of README.md."""
    train = config.train
    name = Path(train.output_dir).name
    front = {
        "library_name": "transformers",
        "license": "other",
        "base_model": config.model.model_name_or_path,
        "tags": ["layerferry", train.finetuning_type, "generated_from_trainer"],
        "pipeline_tag": "text-generation",
        "model-index": [{"name": name, "results": []}],
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", "", f"# {name}", ""]
    datasets = ", ".join(config.data.dataset)
    kind = "a full-parameter fine-tune" if num_trained == num_params else f"a fine-tune of {num_trained:,} parameters"
    lines += [
        f"This model is {kind} of {config.model.model_name_or_path} on {datasets}, trained with LayerFerry: "
        f"{num_params:,} parameters, fp32 masters, saved as {'fp32' if train.fp32 else 'bf16'}.",
        "",
    ]
    lines += ["## Hyperparameters", ""]
    lines += [f"- {key}: {value}" for key, value in _hyperparameters(config, total_steps).items()]
    lines += _results(entries)
    lines += ["", "## Versions", "", f"- layerferry {VERSION}", *(f"- {name} {_version(name)}" for name in PACKAGES), ""]
    return "\n".join(lines)


def _hyperparameters(config: Config, total_steps: int) -> dict[str, object]:
    train, optim = config.train, config.optim
    return {
        "stage": train.stage,
        "learning_rate": optim.learning_rate,
        "lr_scheduler_type": optim.lr_scheduler_type,
        "warmup": optim.warmup_steps or optim.warmup_ratio,
        "train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "total_train_batch_size": train.per_device_train_batch_size * train.gradient_accumulation_steps,
        "optimizer": _optimizer(optim),
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.max_grad_norm,
        "training_steps": total_steps,
        "cutoff_len": config.data.cutoff_len,
        "seed": train.seed,
    }


def _optimizer(optim: OptimConfig) -> str:
    """Rule, its numbers, and in how many bits its state was kept."""
    rule, state = chosen(optim)
    betas = f", betas ({optim.adam_beta1}, {optim.adam_beta2})"
    adamw = f"{betas}, epsilon {optim.adam_epsilon}"
    momentum = DEFAULT_MOMENTUM if optim.momentum is None else optim.momentum
    numbers = {
        "AdamW": adamw,
        "Lion": betas,
        "SGD": f", momentum {optim.momentum or 0.0}",
        "Muon": f", momentum {momentum}, for the layers' matrices, and AdamW{adamw}, 8bit moments, for the rest",
    }
    kept = "" if state == StateFormat() else f", {state.master} master weights, {state.moments} moments"
    return f"{rule}{numbers.get(rule, '')}{kept}"


def _results(entries: list[Entry]) -> list[str]:
    evaluated = [entry for entry in entries if "eval_loss" in entry]
    if not evaluated:
        return []
    rows = ["", "## Evaluation", "", "| epoch | step | validation loss |", "|---|---|---|"]
    return rows + [f"| {entry['epoch']:.4g} | {int(entry['step'])} | {entry['eval_loss']:.4f} |" for entry in evaluated]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
