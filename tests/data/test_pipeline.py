"""From files to tokenised sets: what is dropped is counted and named; no rows are an error; what is kept comes back."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerferry.config import Config, DataConfig, ModelConfig, TrainConfig
from layerferry.data import DataSets, Sampler, build, mix
from layerferry.errors import ConfigError, DataError
from tests.data import lf

ROWS = [{"instruction": f"question {n}", "input": "", "output": f"answer {n}"} for n in range(30)]


def config(folder: Path, *, train: dict[str, Any] | None = None, **data: Any) -> Config:
    settings = {"dataset": ("a",), "dataset_dir": str(folder), "template": "qwen3_nothink", **data}
    return Config(
        model=ModelConfig(model_name_or_path=str(lf.FOLDER / "tokenizer")),
        data=DataConfig(**settings),
        train=TrainConfig(**(train or {})),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"a.json": ROWS[:20], "b.json": ROWS[20:], "bad.jsonl": []}
    for name, rows in files.items():
        (tmp_path / name).write_text(json.dumps(rows), encoding="utf-8")
    info = {name.split(".")[0]: {"file_name": name} for name in files}
    info["few"] = {"file_name": "a.json", "num_samples": 5}
    info["text"] = {"file_name": "t.txt", "columns": {"prompt": "text"}}
    (tmp_path / "t.txt").write_text("The ferry crosses at noon.\n" * 40 + "\n", encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return tmp_path


def texts(sets: DataSets, name: str = "train") -> list[str]:
    """The numbers of the questions in a set."""
    tokenizer = lf.tokenizer()
    samples = sets.train if name == "train" else sets.eval[name]
    return [tokenizer.decode(sample.input_ids).split("question ")[1].split("<")[0] for sample in samples]


def numbers(*indices: int) -> list[str]:
    return [str(index) for index in indices]


def test_rows_in_order(folder: Path) -> None:
    sets = build(config(folder, dataset=("a", "b")), lf.tokenizer())
    assert texts(sets) == numbers(*range(30))
    assert (sets.report.read, sets.report.dropped, sets.eval) == (30, 0, {})
    measured = sets.report.sets["train"]
    assert measured["samples"] == 30
    assert measured["tokens"] == sum(len(sample) for sample in sets.train)
    assert measured["trained_tokens"] == sum(int((sample.labels >= 0).sum()) for sample in sets.train)
    assert sets.pad_id == lf.tokenizer().convert_tokens_to_ids("<|im_end|>")


def test_max_samples_and_num_samples(folder: Path) -> None:
    assert texts(build(config(folder, dataset=("a", "b"), max_samples=3), lf.tokenizer())) == numbers(0, 1, 2, 20, 21, 22)
    drawn = mix.drawn(20, 5, np.random.RandomState(42))
    assert texts(build(config(folder, dataset=("few",)), lf.tokenizer())) == numbers(*drawn)


def test_interleaving(folder: Path) -> None:
    sets = build(config(folder, dataset=("a", "b"), mix_strategy="interleave_under"), lf.tokenizer())
    assert texts(sets) == numbers(*(n for pair in zip(range(10), range(20, 30), strict=True) for n in pair))


def test_evaluation_sets(folder: Path) -> None:
    train, held = mix.split(20, 0.2, 42)
    sets = build(config(folder, val_size=0.2), lf.tokenizer())
    assert (texts(sets), texts(sets, "eval")) == (numbers(*train), numbers(*held))
    sets = build(config(folder, eval_dataset=("b",)), lf.tokenizer())
    assert texts(sets, "eval") == numbers(*range(20, 30))
    sets = build(config(folder, eval_dataset=("b", "a"), eval_on_each_dataset=True), lf.tokenizer())
    assert {name: len(found) for name, found in sets.eval.items()} == {"b": 10, "a": 20}


def bad_rows(folder: Path, rows: list[Any]) -> Config:
    (folder / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return config(folder, dataset=("bad",))


def test_bad_rows_are_counted_and_named_in_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FAULTS row 16."""
    empty, null = {"instruction": "q", "input": "", "output": ""}, {"instruction": "q", "input": "", "output": None}
    rows = [empty, ROWS[0], null, empty, ROWS[1], 3, empty, empty, empty]
    with caplog.at_level(logging.WARNING):
        sets = build(bad_rows(folder, rows), lf.tokenizer())
    assert texts(sets) == numbers(0, 1)
    assert sets.report.reasons == {"an answer is empty": 5, "the answer is null or missing": 1, "the row is not an object": 1}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("7 of 9 rows dropped (5 x an answer is empty; 1 x ")
    file = folder / "bad.jsonl"
    assert f"First: {file}:1: an answer is empty; {file}:3: the answer is null or missing; {file}:4:" in warning
    assert warning.endswith("; ...")


def test_a_set_without_rows_is_an_error(folder: Path) -> None:
    with pytest.raises(DataError, match="no row is left in the train set: 2 of 2 rows dropped.*an answer is empty"):
        build(bad_rows(folder, [{"instruction": "q", "output": ""}] * 2), lf.tokenizer())
    with pytest.raises(DataError, match="no row is left in the train set: its files hold no rows"):
        build(bad_rows(folder, []), lf.tokenizer())


def test_all_labels_masked_is_an_error(folder: Path) -> None:
    """FAULTS row 13: every answer lies beyond cutoff_len."""
    (folder / "long.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "long " * 50}, {"role": "assistant", "content": "a"}]}),
        encoding="utf-8",
    )
    with pytest.raises(DataError, match="no row is left in the train set: 1 of 1 rows dropped .1 x no trained token is left"):
        build(config(folder, dataset=(str(folder / "long.jsonl"),), template="auto", cutoff_len=20), lf.tokenizer())


def test_malformed_json_names_file_and_line(folder: Path) -> None:
    (folder / "bad.jsonl").write_text(json.dumps(ROWS[0]) + "\n{oops\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"bad.jsonl:2: not JSON"):
        build(config(folder, dataset=("bad",)), lf.tokenizer())


def test_packing_of_both_kinds(folder: Path) -> None:
    for neat in (False, True):
        sets = build(config(folder, packing=True, neat_packing=neat, cutoff_len=64), lf.tokenizer())
        assert all(sample.isolated == neat and len(sample) <= 63 for sample in sets.train)
        restarts = sum(int((sample.position_ids == 0).sum()) for sample in sets.train if sample.position_ids is not None)
        assert restarts == 20
    assert all(sample.position_ids is not None for sample in build(config(folder, neat_packing=True), lf.tokenizer()).train)


def test_packs_stay_within_their_chunk(folder: Path) -> None:
    sets = build(config(folder, packing=True, cutoff_len=2048, preprocessing_batch_size=6), lf.tokenizer())
    assert len(sets.train) == 4


def test_pretraining(folder: Path) -> None:
    train = {"stage": "pt"}
    blocks = build(config(folder, dataset=("text",), train=train, cutoff_len=16), lf.tokenizer())
    assert {len(sample) for sample in blocks.train} == {16}
    assert blocks.report.reasons == {"the text is empty": 1}
    lines = build(config(folder, dataset=(str(folder / "t.txt"),), train=train, packing=False), lf.tokenizer())
    assert len(lines.train) == 40
    with pytest.raises(DataError, match="fill no block of cutoff_len 2048"):
        build(config(folder, dataset=("text",), train=train, max_samples=3), lf.tokenizer())


def test_streaming_reads_what_the_steps_can_use(folder: Path) -> None:
    train = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    sets = build(config(folder, streaming=True, train=train, preprocessing_batch_size=4), lf.tokenizer())
    assert texts(sets) == numbers(*range(8))
    assert sets.report.read == 8


def test_tokenised_sets_come_back_whatever_the_other_keys_say(folder: Path) -> None:
    kept = str(folder / "kept")
    made = build(config(folder, val_size=4, neat_packing=True, tokenized_path=kept), lf.tokenizer())
    again = build(config(folder, dataset=("gone",), tokenized_path=kept), lf.tokenizer())
    assert set(again.eval) == {"eval"}
    for one, two in ((made.train, again.train), (made.eval["eval"], again.eval["eval"])):
        assert one.isolated and two.isolated
        assert {key: value.tolist() for key, value in one.state().items()} == {key: v.tolist() for key, v in two.state().items()}
    assert again.report.sets == made.report.sets


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        ({}, {"stage": "dpo"}, "stage dpo has no data pipeline"),
        ({"cutoff_len": 1}, {}, "cutoff_len 1 leaves nothing"),
        ({"val_size": -1.0}, {}, "val_size -1 is negative"),
        ({"val_size": 0.1, "eval_dataset": ("b",)}, {}, "val_size: excludes eval_dataset"),
        ({"train_on_prompt": True, "mask_history": True}, {}, "mask_history: excludes train_on_prompt"),
    ],
)
def test_conflicts(folder: Path, data: dict[str, Any], train: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(config(folder, train=train, **data), lf.tokenizer())


def test_building_twice_is_the_same(folder: Path) -> None:
    one, two = (build(config(folder), lf.tokenizer()) for _ in range(2))
    assert one.train.ids.tolist() == two.train.ids.tolist()
    sampler = Sampler.of(config(folder), len(one.train))
    assert sampler.steps_per_epoch == 3
