"""dataset_info.json and direct files: what an entry means, and one clear line for what cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from layerferry.data import registry
from layerferry.errors import DataError


def write(folder: Path, table: dict[str, Any]) -> str:
    (folder / "dataset_info.json").write_text(json.dumps(table), encoding="utf-8")
    return str(folder)


def one(folder: Path, given: dict[str, Any], stage: str = "sft") -> registry.Entry:
    (found,) = registry.resolve(("ours",), write(folder, {"ours": given}), stage=stage)
    return found


def test_defaults(tmp_path: Path) -> None:
    found = one(tmp_path, {"file_name": "x.json"})
    assert found.path == tmp_path / "x.json"
    assert found.columns == registry.DEFAULT_COLUMNS
    assert found.tags == registry.DEFAULT_TAGS


def test_named_columns_and_tags_leave_nothing_else(tmp_path: Path) -> None:
    found = one(tmp_path, {"file_name": "x.json", "columns": {"prompt": "q"}, "tags": {"role_tag": "r"}})
    assert {key: value for key, value in found.columns.items() if value} == {"prompt": "q"}
    assert {key: value for key, value in found.tags.items() if value} == {"role_tag": "r"}


def test_the_registry_may_be_named_as_a_file(tmp_path: Path) -> None:
    write(tmp_path, {"ours": {"file_name": "x.json"}})
    (found,) = registry.resolve(("ours",), str(tmp_path / "dataset_info.json"), stage="sft")
    assert found.path == tmp_path / "x.json"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"file_name": "x.json", "ranking": True}, "ranking data"),
        ({"file_name": "x.json", "formatting": "alpca"}, "unknown formatting 'alpca'"),
        ({"file_name": "x.json", "columns": {"promt": "q"}}, "unknown column promt: did you mean prompt"),
        ({"file_name": "x.json", "tags": {"usertag": "q"}}, "unknown tag usertag: did you mean user_tag"),
        ({"file_name": "x.json", "columns": ["q"]}, "columns is not an object"),
        ({"file_name": "x.json", "columns": {"prompt": 5}}, "columns: prompt: expected the name of a column, found 5"),
        ({"file_name": "x.json", "columns": {"prompt": ["q"]}}, "columns: prompt: expected the name of a column"),
        ({"file_name": "x.json", "tags": {"role_tag": {}}}, "tags: role_tag: expected"),
        ({"file_name": 5}, "file_name: expected text, found 5"),
        ({"file_name": ["x.json"]}, "file_name: expected text"),
        ({"hf_hub_url": "a/b", "split": 3}, "split: expected text, found 3"),
        ({"file_name": "x.json", "num_samples": "many"}, "num_samples: expected a whole number above 0, found 'many'"),
        ({"file_name": "x.json", "num_samples": -2}, "num_samples: expected a whole number above 0, found -2"),
        ({"file_name": "x.json", "num_samples": 2.5}, "num_samples: expected a whole number"),
        ({"file_name": "x.json", "columns": {"prompt": "q", "kto_tag": "label"}}, "kto data"),
        ({}, "none of hf_hub_url"),
        ({"ms_hub_url": "a/b"}, "ms_hub_url is not supported"),
        ({"script_url": "a"}, "script_url is not supported"),
        ({"cloud_file_name": "s3://a"}, "cloud_file_name is not supported"),
    ],
)
def test_unusable_entries_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        one(tmp_path, given)


def test_unknown_names_get_a_hint(tmp_path: Path) -> None:
    folder = write(tmp_path, {"identity": {"file_name": "x.json"}})
    with pytest.raises(DataError, match="dataset identiy is not in .*did you mean identity"):
        registry.resolve(("identiy",), folder, stage="sft")


def test_missing_and_broken_registries(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist: set dataset_dir"):
        registry.resolve(("ours",), str(tmp_path), stage="sft")
    (tmp_path / "dataset_info.json").write_text('{\n"a": }', encoding="utf-8")
    with pytest.raises(DataError, match=r"dataset_info.json:2: not JSON"):
        registry.resolve(("ours",), str(tmp_path), stage="sft")
    (tmp_path / "dataset_info.json").write_bytes(b'{"a": "caf\xe9"}')
    with pytest.raises(DataError, match=r"dataset_info.json cannot be read: not text in UTF-8"):
        registry.resolve(("ours",), str(tmp_path), stage="sft")
    (tmp_path / "dataset_info.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(DataError, match=r"dataset_info.json: not JSON: nested too deeply"):
        registry.resolve(("ours",), str(tmp_path), stage="sft")
    (tmp_path / "dataset_info.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="not list"):
        registry.resolve(("ours",), str(tmp_path), stage="sft")
    with pytest.raises(DataError, match="no dataset is named"):
        registry.resolve((), str(tmp_path), stage="sft")
    with pytest.raises(DataError, match=r"download its dataset_info.json"):
        registry.resolve(("ours",), "REMOTE:someone/registry", stage="sft")


@pytest.mark.parametrize(
    ("row", "formatting", "stage"),
    [
        ({"messages": []}, "openai", "sft"),
        ({"conversations": []}, "sharegpt", "sft"),
        ({"prompt": "q", "completion": "a"}, "prompt_completion", "sft"),
        ({"instruction": "q", "output": "a"}, "alpaca", "sft"),
        ({"text": "t"}, "text", "pt"),
    ],
)
def test_direct_files_say_what_they_are(tmp_path: Path, row: dict[str, Any], formatting: str, stage: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    for name, folder in ((str(file), "data"), ("rows.jsonl", str(tmp_path))):
        (found,) = registry.resolve((name,), folder, stage=stage)
        assert (found.formatting, found.path) == (formatting, file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "q", "chosen": "a", "rejected": "b"}\n', "ranking data"),
        ('{"text": "t"}\n', "only text, no answers: use stage: pt"),
        ('{"a": 1}\n', "no known columns among a"),
        ("", "has no rows"),
    ],
)
def test_unusable_direct_files(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        registry.resolve((str(file),), "data", stage="sft")


def test_hub_names_fail_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def load_dataset(path: str, **_: Any) -> list[dict[str, str]]:
            if path == "a/there":
                return [{"instruction": "q", "output": "a"}] * 3
            raise ConnectionError("no route to the hub\nand more lines")

    monkeypatch.setitem(sys.modules, "datasets", Library)  # type: ignore[arg-type]
    assert len(list(one(tmp_path, {"hf_hub_url": "a/there"}).rows(2))) == 2
    with pytest.raises(DataError, match=r"a/b cannot be had from the hub: no route to the hub$"):
        list(one(tmp_path, {"hf_hub_url": "a/b"}).rows())
    with pytest.raises(DataError, match="cannot be had"):
        list(registry.resolve(("a/b",), "ONLINE", stage="sft")[0].rows())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        list(one(tmp_path, {"hf_hub_url": "a/b"}).rows())


def test_a_path_without_a_file_is_said_to_be_missing(tmp_path: Path) -> None:
    for name in (str(tmp_path / "rows.jsonl"), "sub/rows.jsonl", "rows.jsonl"):
        with pytest.raises(DataError, match="rows.jsonl: no such file"):
            registry.resolve((name,), str(tmp_path), stage="sft")
    folder = write(tmp_path, {"ours": {"file_name": "x.json"}})
    with pytest.raises(DataError, match="rows.jsonl: no such file, and no name in .*dataset_info.json"):
        registry.resolve(("rows.jsonl",), folder, stage="sft")


def test_a_direct_file_whose_first_row_is_no_object(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('null\n{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"rows.jsonl:1: the first row is not an object, so its columns are not known"):
        registry.resolve((str(file),), str(tmp_path), stage="sft")
