"""New vocabulary rows: the old ones stay, the new ones lie around their mean, and a saved model loads in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerferry
from layerferry.config import Config, ModelConfig, TrainConfig
from layerferry.errors import CheckpointError
from layerferry.models.grown import GrownSource, grown_rows
from layerferry.plan import Plan
from tests.models.tiny_models import tiny_model


class Fixed:
    def __init__(self, **values: Tensor) -> None:
        self.values = values

    def load(self, name: str) -> Tensor:
        return self.values[name]

    def num_bytes(self, name: str) -> int:
        return self.values[name].numel() * self.values[name].element_size()


def test_rows_are_rounded_up() -> None:
    assert [grown_rows(n) for n in (1, 64, 65, 151_700)] == [64, 64, 128, 151_744]


def test_new_rows_lie_around_the_mean_and_old_ones_stay() -> None:
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(4096, 256)})
    old = torch.randn(64, 256) + 3.0
    grown = GrownSource(Fixed(**{"table.weight": old}), model, old_rows=64, seed=1)
    value = grown.load("table.weight")
    assert torch.equal(value[:64], old)
    spread = value[64:] - old.mean(0)
    assert float(spread.std()) == pytest.approx(1 / 16, rel=0.01)  # a million draws: the error of the estimate is 0.1 %
    assert torch.equal(value, grown.load("table.weight"))


def test_another_shape_is_refused() -> None:
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(128, 8)})
    with pytest.raises(CheckpointError, match="resize_vocab"):
        GrownSource(Fixed(**{"table.weight": torch.zeros(65, 8)}), model, old_rows=64, seed=0).load("table.weight")


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_grown_model_trains_and_reloads(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = tiny_model(kind)
    rows = model.config.vocab_size
    model.save_pretrained(tmp_path / "base")
    config = Config(model=ModelConfig(model_name_or_path=str(tmp_path / "base"), resize_vocab=True), train=TrainConfig(fp32=True))
    engine = layerferry.load(str(tmp_path / "base"), config=config, plan=Plan(fp32=True), num_tokens=rows + 3)
    engine.save_pretrained(tmp_path / "grown")
    engine.close()
    grown = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    assert grown.config.vocab_size == grown_rows(rows + 3)
    assert torch.equal(grown.get_input_embeddings().weight[:rows], model.get_input_embeddings().weight)
