"""The model card: front matter that parses, and the numbers of the run."""

from __future__ import annotations

from pathlib import Path

import yaml

from layerferry.trainer.card import model_card
from tests.trainer.fakes import make_config


def test_card(tmp_path: Path) -> None:
    entries = [{"eval_loss": 1.25, "step": 5, "epoch": 0.5}, {"loss": 1.0, "step": 6, "epoch": 0.6}]
    config, counts = (
        make_config(tmp_path / "mine", gradient_accumulation_steps=3),
        {"num_params": 1234567, "num_trained": 1234567},
    )
    card = model_card(config, entries=entries, total_steps=6, **counts)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "base"
    assert "# mine" in body and "1,234,567 parameters" in body and "a full-parameter fine-tune of base" in body
    assert "- total_train_batch_size: 6" in body and "| 0.5 | 5 | 1.2500 |" in body


def test_no_evaluation_no_table(tmp_path: Path) -> None:
    card = model_card(make_config(tmp_path), entries=[], total_steps=1, num_params=2, num_trained=1)
    assert "Evaluation" not in card and "a fine-tune of 1 parameters of base" in card
