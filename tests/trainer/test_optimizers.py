"""A whole run with another optimizer: named in the configuration, resumed with the same bits, exported like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from layerferry.trainer.run import train
from tests.trainer.test_train import make_config, model_folder, rows

__all__ = ["model_folder", "rows"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optim": "adamw_8bit"}, "AdamW, betas (0.9, 0.999), epsilon 1e-08, 24bit master weights, 8bit moments"),
        ({"optim": "sgd", "momentum": 0.9, "master_weights": "bf16"}, "SGD, momentum 0.9, bf16 master weights, fp32 moments"),
        (
            {"optim": "muon"},
            "Muon, momentum 0.95, for the layers' matrices, and AdamW, betas (0.9, 0.999), epsilon 1e-08, 8bit moments",
        ),
    ],
)
def test_a_run_is_resumed_and_loaded(
    model_folder: Path, rows: Path, tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    from transformers import AutoModelForCausalLM

    def run(output: Path, **changes: object) -> dict[str, torch.Tensor]:
        config = make_config(model_folder, rows, output, save_strategy="steps", save_steps=4, **changes)
        optim = replace(config.optim, **settings)  # type: ignore[arg-type]
        train(replace(config, optim=optim, train=replace(config.train, fp32=False)))
        found: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(output).state_dict()
        return found

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    start = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    assert all(bool(value.isfinite().all()) for value in whole.values())
    assert any(not torch.equal(start[name].to(value.dtype), value) for name, value in whole.items())
    assert words in (tmp_path / "whole" / "README.md").read_text()
