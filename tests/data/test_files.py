"""Rows and their places in every file type; malformed files name file and line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerferry.data import files
from layerferry.errors import DataError

ROWS = [{"a": "one", "b": "é"}, {"a": "two", "b": "🚢"}]


def make(folder: Path, kind: str) -> Path:
    file = folder / f"rows.{kind.split('-')[0]}"
    table = pa.Table.from_pylist(ROWS)
    if kind == "json":
        file.write_text(json.dumps(ROWS), encoding="utf-8")
    elif kind in ("jsonl", "json-lines"):
        file.write_text("\n\n".join(map(json.dumps, ROWS)), encoding="utf-8-sig")
    elif kind == "csv":
        file.write_text("a,b\none,é\ntwo,🚢\n", encoding="utf-8")
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        opener = pa.ipc.new_file if kind == "arrow-file" else pa.ipc.new_stream
        with opener(file, table.schema) as writer:
            writer.write_table(table)
    return file


@pytest.mark.parametrize("kind", ["json", "json-lines", "jsonl", "csv", "parquet", "arrow-file", "arrow-stream"])
def test_rows_of_every_type(tmp_path: Path, kind: str) -> None:
    file = make(tmp_path, kind)
    located = list(files.read(file))
    assert [row for _, row in located] == ROWS
    assert all(origin.startswith(str(file)) for origin, _ in located)
    assert [row for _, row in files.read(file, 1)] == ROWS[:1]
    assert [row for _, row in files.read(tmp_path)] == ROWS


def test_lines_are_counted_with_blank_ones(tmp_path: Path) -> None:
    assert [origin.rpartition(":")[2] for origin, _ in files.read(make(tmp_path, "jsonl"))] == ["1", "3"]


def test_text_lines_are_rows(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes("one\r\n\ntwo\u2028still two".encode())
    assert [row["text"] for _, row in files.read(file)] == ["one", "", "two\u2028still two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', r"x.jsonl:2: not JSON"),
        ("x.json", b'[\n{"a": 1},\n{"a" 2}]', r"x.json:3: not JSON"),
        ("x.jsonl", b'{"a": "\xff"}\n', "x.jsonl cannot be read"),
        ("x.jsonl", b'{"a": 1}\n' + b"[" * 100_000, r"x.jsonl:2: not JSON: nested too deeply"),
        ("x.json", b"[" * 100_000, r"x.json: not JSON: nested too deeply"),
        ("x.jsonl", b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", r"x.jsonl:2: not JSON: .*digits"),
        ("x.json", b'{\n  "a": 1\n}', r"x.json:1: neither an array of rows nor one object a line"),
        ("x.parquet", b"not parquet", "x.parquet cannot be read"),
        ("x.arrow", b"not arrow", "x.arrow cannot be read"),
        ("x.xml", b"", r"unknown type .xml"),
    ],
)
def test_malformed_files_name_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(files.read(file))


def test_rows_before_a_broken_line_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{', encoding="utf-8")
    rows = files.read(file)
    assert next(rows)[1] == {"a": 1}
    with pytest.raises(DataError):
        next(rows)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list(files.read(tmp_path / "none"))
    with pytest.raises(DataError, match="has no files"):
        list(files.read(tmp_path))
    (tmp_path / "b.jsonl").write_text('{"n": 2}\n', encoding="utf-8")
    (tmp_path / "a.json").write_text('[{"n": 1}]', encoding="utf-8")
    (tmp_path / ".hidden.csv").write_text("x", encoding="utf-8")
    assert [row["n"] for _, row in files.read(tmp_path)] == [1, 2]
    (tmp_path / "c.txt").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match=r"mixes file types \(json, txt\)"):
        list(files.read(tmp_path))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make(tmp_path, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        list(files.read(file))


def test_csv_cells_may_be_long(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a,b\none,two\n" + "long " * 50_000 + ",three\n", encoding="utf-8")
    assert [len(row["a"]) for _, row in files.read(file)] == [3, 250_000]


MADE = st.one_of(
    st.binary(max_size=400),
    st.text(alphabet='{}[]",:0123456789.eE+-ntrfu\\ \n\r\ufeff\u2028a', max_size=300).map(lambda text: text.encode()),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    ).map(lambda value: json.dumps(value).encode()),
)


@pytest.mark.parametrize("suffix", sorted(files.READERS))
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(content=MADE)
def test_whatever_bytes_it_has_only_our_error_comes(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    try:
        for where, _ in files.read(path):
            assert where.startswith(str(path))
    except DataError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_flipped_bytes_of_tables(tmp_path: Path, suffix: str) -> None:
    """Rows or our error, whatever byte is another."""
    table = pa.table({"text": [f"row {number}" for number in range(20)], "n": list(range(20))})
    whole = tmp_path / f"whole{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, whole)
    else:
        with pa.ipc.new_file(whole, table.schema) as writer:
            writer.write_table(table)
    content, found = whole.read_bytes(), 0
    path = tmp_path / f"rows{suffix}"
    for position in range(0, len(content), max(1, len(content) // 150)):
        damaged = bytearray(content)
        damaged[position] ^= 0x55
        path.write_bytes(damaged)
        try:
            list(files.read(path))
        except DataError:
            found += 1
    assert found > 10


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_deep_nesting_is_our_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(DataError, match="nested too deeply"):
        list(files.read(path))
