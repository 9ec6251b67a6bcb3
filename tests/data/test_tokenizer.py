"""Loading the tokenizer: tokens added are counted, and what cannot be loaded is one clear line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from layerferry.config import Config, DataConfig, ModelConfig
from layerferry.data import tokenizer as module
from layerferry.errors import DataError
from tests.data import lf

PATH = str(lf.FOLDER / "tokenizer")


def config(template: str | None = "qwen3", **model: Any) -> Config:
    return Config(model=ModelConfig(**{"model_name_or_path": PATH, **model}), data=DataConfig(template=template))


def test_template_tokens_are_in_place() -> None:
    loaded = module.load(config())
    assert loaded.num_added == 0
    assert loaded.template is not None and loaded.template.name == "qwen3"
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    assert module.load(config("auto")).template is None
    assert module.load(config("auto")).tokenizer.pad_token == "</s>"


def test_added_tokens_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = module.load(config(add_tokens=("ferryboat",), add_special_tokens=("<|buoy|>", "<|im_end|>")))
    assert loaded.num_added == 2
    assert "2 tokens are new to the tokenizer" in caplog.text
    ids = loaded.tokenizer.encode("ferryboat<|buoy|>", add_special_tokens=False)
    assert len(ids) == 2 and max(ids) == len(loaded.tokenizer) - 1
    caplog.clear()
    module.load(config(add_tokens=("ferryboat",), resize_vocab=True))
    assert "new to the tokenizer" not in caplog.text


def test_split_special_tokens() -> None:
    loaded = module.load(config(split_special_tokens=True))
    assert len(loaded.tokenizer.encode("<|im_end|>", add_special_tokens=False)) > 1


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer: one of tokenizer.json"):
        module.load(config(model_name_or_path=str(tmp_path)))


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=f"the tokenizer of {tmp_path} cannot be loaded: "):
        module.load(config(model_name_or_path=str(tmp_path)))
