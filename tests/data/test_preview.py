"""The preview shows the rows that training uses, and which of their tokens are trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerferry.config import Config, DataConfig, ModelConfig
from layerferry.data import build, preview
from layerferry.data.pipeline import Report
from layerferry.errors import DataError
from tests.data import lf


def config(folder: Path, **data: object) -> Config:
    rows = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(5)] + [{"prompt": "q", "completion": ""}]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = DataConfig(dataset=(str(file),), template="qwen3_nothink", **data)  # type: ignore[arg-type]
    return Config(model=ModelConfig(model_name_or_path=str(lf.FOLDER / "tokenizer")), data=given)


def test_samples_are_the_training_rows(tmp_path: Path) -> None:
    for data in ({}, {"neat_packing": True}):
        report = Report()
        given = config(tmp_path, **data)
        shown = list(preview.samples(given, lf.tokenizer(), report))
        trained = build(given, lf.tokenizer()).train
        assert [sample["input_ids"] for sample in shown] == [sample.input_ids.tolist() for sample in trained]
        assert [sample["labels"] for sample in shown] == [sample.labels.tolist() for sample in trained]
        assert all(("position_ids" in sample) == bool(data) for sample in shown)
        assert json.loads(json.dumps(shown)) == shown
        assert report.dropped == 1


def test_trained_tokens_stand_out(tmp_path: Path) -> None:
    first, second = preview.render(config(tmp_path), lf.tokenizer(), 2, colour=False)
    head, _, text = first.partition("\n")
    assert head.startswith("row 1: ") and head.endswith(" trained")
    assert text == "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n⟦a0<|im_end|>\n⟧"
    assert "⟦a1" in second
    (coloured,) = preview.render(config(tmp_path), lf.tokenizer(), 1)
    assert "\x1b[32ma0<|im_end|>\n\x1b[0m" in coloured


def test_rows_are_counted(tmp_path: Path) -> None:
    """Before anything is dropped, and those held out apart."""
    assert preview.counts(config(tmp_path)) == "rows in the files: 6 for training; held out: none"
    assert preview.counts(config(tmp_path, val_size=2)) == "rows in the files: 4 for training; held out: 2 eval"
    assert preview.counts(config(tmp_path, eval_dataset=(str(tmp_path / "rows.jsonl"),))).endswith("held out: 6 eval")


def test_dropped_rows_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = config(tmp_path)
    with caplog.at_level("WARNING"):
        list(preview.samples(given, lf.tokenizer()))
    assert caplog.text.count("1 of 6 rows dropped (1 x an answer is empty)") == 1
    caplog.clear()
    with caplog.at_level("WARNING"):
        list(preview.render(given, lf.tokenizer(), 3, colour=False))
    assert "dropped" not in caplog.text  # it has not come so far


def test_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    given = config(tmp_path)
    file = Path(given.data.dataset[0])
    file.write_text('{"prompt": "q", "completion": ""}\n', encoding="utf-8")
    for shown in (preview.samples(given, lf.tokenizer()), preview.render(given, lf.tokenizer(), 3)):
        with pytest.raises(DataError, match="no row is left in the train set: 1 of 1 rows dropped"):
            list(shown)
