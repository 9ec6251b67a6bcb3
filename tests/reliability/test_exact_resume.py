"""N steps = k + resume + (N - k) through the front door, for every k: every byte that a run leaves is the same.

Weights, residues, moments (the state files of every later checkpoint), learning rates, losses, norms, token counts and sample
order (history, cursor), dropout (the model has some).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from layerferry.trainer import train
from tests.reliability.runs import assert_same_folder, cut, make_config, prepare

CASES: dict[str, dict[str, Any]] = {
    "two epochs": {"num_train_epochs": 2, "per_device_train_batch_size": 2},
    "max_steps, fp32": {"max_steps": 4, "fp32": True, "gradient_accumulation_steps": 3, "save_strategy": "steps"},
    "evaluation, plateau": {
        "max_steps": 4,
        "data": {"val_size": 2},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "optim": {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "warmup_ratio": 0.0,
            "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 1.0},
        },
    },
    "packing": {"max_steps": 3, "data": {"packing": True, "cutoff_len": 16}},
    "streaming": {"max_steps": 3, "data": {"streaming": True}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("case", CASES)
def test_every_k(base: Path, tmp_path: Path, case: str) -> None:
    whole = tmp_path / "whole"
    train(make_config(base, whole, **CASES[case]))
    last = max(int(path.name.split("-")[1]) for path in whole.glob("checkpoint-*"))
    assert last >= 3
    plans = ("resident", "disk", "threads", "streamed")
    for k in range(1, last + 1):
        output = tmp_path / "resumed" / whole.name  # the name of the folder is in the trackers' and the card's titles
        shutil.copytree(whole, output)
        cut(output, k)
        train(make_config(base, output, engine=plans[k % 4], **CASES[case]))
        assert_same_folder(output, whole)
        for step in range(1, last + 1):
            assert_same_folder(output / f"checkpoint-{step}", whole / f"checkpoint-{step}")
        shutil.rmtree(output)
    assert not list(whole.glob(".*"))
