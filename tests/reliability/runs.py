"""Tiny training runs through the front door, their interruption, and the comparison with a run that was left alone.

Everything that a run leaves is compared byte for byte, except what tells the time: durations, rates, dates.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from layerferry.checkpoint.files import Files
from layerferry.checkpoint.manifest import MANIFEST
from layerferry.checkpoint.save import Saver
from layerferry.config import Config, DataConfig, EngineConfig, ModelConfig, OptimConfig, TrainConfig

TOKENIZER = Path(__file__).parents[1] / "goldens" / "data" / "tokenizer"
WORDS = ("ferry", "river", "bank", "rope", "load", "north", "tide", "cold")
NUM_ROWS = 11

TIMES = re.compile(
    r'"(elapsed_time|remaining_time|throughput|train_runtime|train_samples_per_second|train_steps_per_second'
    r'|eval_\w*runtime|eval_\w*per_second|runtime)": ("[^"]*"|[-+.\deE]+)'
)

ENGINES = {
    "streamed": EngineConfig(device="cpu", num_slots=2, num_slabs=1),
    "resident": EngineConfig(device="cpu", num_slots=4, num_slabs=3, activation_budget=0.0, turn_layers=1),
    "disk": EngineConfig(device="cpu", num_slots=2, disk_memory=1 << 20, disk_units=3),
    "threads": EngineConfig(device="cpu", num_slots=3, optimizer_threads=2),
}
"""Settings that choose other plans with the same bits."""


def make_model(folder: Path, **changes: Any) -> Path:
    """A two-layer Llama with attention dropout, so that random numbers matter."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    for path in TOKENIZER.iterdir():
        shutil.copy(path, folder)
    sizes = {
        "vocab_size": len(AutoTokenizer.from_pretrained(folder)),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_rows(path: Path, num_rows: int = NUM_ROWS) -> Path:
    texts = [" ".join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(2 + i)) for i in range(num_rows)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_config(
    base: Path, output: Path, *, engine: str = "streamed", data: Mapping[str, Any] | None = None, **train: Any
) -> Config:
    """A run on ``base/model`` and ``base/rows.jsonl``."""
    optim = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.2, **train.pop("optim", {})}
    return Config(
        model=ModelConfig(model_name_or_path=str(base / "model")),
        data=replace(
            DataConfig(dataset=(str(base / "rows.jsonl"),), cutoff_len=24, packing=False, template="empty"), **(data or {})
        ),
        optim=OptimConfig(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.5, **optim),
        train=TrainConfig(
            stage="pt",
            output_dir=str(output),
            **{
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 2,
                "logging_steps": 2,
                "num_train_epochs": 1,
                "save_steps": 1,
                "include_num_input_tokens_seen": True,
                "disable_tqdm": True,
                **train,
            },
        ),
        engine=ENGINES[engine],
    )


def prepare(base: Path) -> Path:
    """``base`` with the model and the rows."""
    make_model(base / "model")
    make_rows(base / "rows.jsonl")
    return base


def saver_on(files: Files) -> Callable[..., Saver]:
    """What stands for ``Saver`` in the trainer, which names files of its own: checkpoints go through ``files`` instead."""

    def build(*arguments: Any, **settings: Any) -> Saver:
        return Saver(*arguments, **{**settings, "files": files})

    return build


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a checkpoint or an output folder, times taken out; manifests and pictures aside."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in (MANIFEST, "latest", "README.md") and path.suffix != ".png":
            content = path.read_bytes()
            if path.suffix in (".json", ".jsonl"):
                content = TIMES.sub(r'"\1": 0', content.decode()).encode()
            found[path.name] = content
    return found


def assert_same_folder(found: Path, expected: Path) -> None:
    """The same files with the same bytes."""
    one, other = contents(found), contents(expected)
    assert one.keys() == other.keys()
    for name in other:
        if one[name] != other[name]:
            where = next((i for i, (a, b) in enumerate(zip(one[name], other[name], strict=False)) if a != b), -1)
            around = slice(max(where - 60, 0), where + 60)
            raise AssertionError(
                f"{found / name} differs at byte {where}: {one[name][around]!r}, expected {other[name][around]!r}"
            )


def cut(output: Path, step: int) -> None:
    """As if the run had been killed right behind ``checkpoint-<step>``: nothing later is there, nor what is left at the end."""
    for path in output.iterdir():
        number = path.name.removeprefix("checkpoint-")
        if path.is_dir() and number.isdigit() and int(number) > step:
            shutil.rmtree(path)
        elif path.suffix in (".safetensors", ".png", ".md") or path.name.endswith("_results.json"):
            path.unlink()
