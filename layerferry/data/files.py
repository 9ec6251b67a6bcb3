"""Rows of a data file, each with the place it came from, so that every complaint can name file and line.

JSONL is read line by line: a file larger than memory is never whole in it. A ``.json`` may hold an array or, as the ``datasets``
library accepts too, one object per line. Parquet and Arrow need pyarrow, which is imported only here.
Checked by ``tests/data/test_files.py``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from layerferry.errors import DataError

Located = tuple[str, Any]
"""Where a row stands (``file:line``), and the row."""


def read(path: Path, limit: int | None = None) -> Iterator[Located]:
    """The rows of ``path``: one file, or a folder whose files have one type; at most ``limit`` of them."""
    count = 0
    for file in _members(path):
        for located in READERS[file.suffix.lower()](file):
            if limit is not None and count >= limit:
                return
            count += 1
            yield located


def _members(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"data file {path} does not exist: see file_name in dataset_info.json, and dataset_dir")
    found = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")) if path.is_dir() else [path]
    if not found:
        raise DataError(f"data folder {path} has no files")
    types = {_type(file) for file in found}
    if len(types) > 1:
        raise DataError(f"data folder {path} mixes file types ({', '.join(sorted(types))}): keep one type per folder")
    return found


def _type(file: Path) -> str:
    suffix = file.suffix.lower()
    if suffix not in READERS:
        raise DataError(f"{file}: unknown type {suffix or 'without suffix'}; known: {', '.join(sorted(READERS))}")
    return "json" if suffix == ".jsonl" else suffix[1:]


def _open(file: Path) -> TextIO:
    return file.open(encoding="utf-8-sig", newline="\n")


def _json(file: Path) -> Iterator[Located]:
    with _open(file) as stream:
        first = stream.read(1)
        while first and first.isspace():
            first = stream.read(1)
        stream.seek(0)
        yield from _json_array(file, stream) if first == "[" else _json_lines(file, stream)


def parse(text: str, file: Path, first_line: int | None = None) -> Any:
    """``text`` as JSON; what is wrong with it names the line, counted from ``first_line`` (None: a whole file, from 1)."""
    where = str(file) if first_line is None else f"{file}:{first_line}"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = error.lineno + (first_line or 1) - 1
        raise DataError(f"{file}:{line}: not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise DataError(f"{where}: not JSON: nested too deeply") from None
    except ValueError as error:  # a whole number of more digits than Python converts
        raise DataError(f"{where}: not JSON: {str(error).partition(';')[0]}") from None


def _json_array(file: Path, stream: TextIO) -> Iterator[Located]:
    for number, row in enumerate(parse(stream.read(), file), 1):
        yield f"{file}, row {number}", row


def _json_lines(file: Path, stream: TextIO) -> Iterator[Located]:
    for number, line in enumerate(stream, 1):
        if line.strip() == "{":
            raise DataError(f"{file}:{number}: neither an array of rows nor one object a line")
        if line.strip():
            yield f"{file}:{number}", parse(line.rstrip(), file, number)


def _text(file: Path) -> Iterator[Located]:
    with _open(file) as stream:
        for number, line in enumerate(stream, 1):
            yield f"{file}:{number}", {"text": line.rstrip("\r\n")}


def _csv(file: Path) -> Iterator[Located]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit is 131,072 characters a cell, less than a long document
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            yield f"{file}:{reader.line_num}", row


def _parquet(file: Path) -> Iterator[Located]:
    parquet = _pyarrow(file, "parquet")
    number = 0
    for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row


def _arrow(file: Path) -> Iterator[Located]:
    ipc = _pyarrow(file, "ipc")
    number = 0
    with file.open("rb") as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        reader = ipc.open_file(stream) if is_file else ipc.open_stream(stream)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            batch.validate(full=True)  # TRAP: damaged offsets would be followed out of the buffer (tests/data/test_files.py)
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row


def _pyarrow(file: Path, module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError:
        raise DataError(f"{file}: reading {file.suffix} files needs pyarrow: pip install pyarrow") from None


def _guarded(reader: Callable[[Path], Iterator[Located]]) -> Callable[[Path], Iterator[Located]]:
    """A reader whose decoding and format failures name the file instead of a codec."""

    def guarded(file: Path) -> Iterator[Located]:
        try:
            yield from reader(file)
        except (UnicodeDecodeError, OSError, csv.Error) as error:
            raise DataError(f"{file} cannot be read: {error}") from None
        except (ValueError, NotImplementedError, TypeError, LookupError) as error:  # the classes of pyarrow's errors
            raise DataError(f"{file} cannot be read as {file.suffix}: {error}") from None

    return guarded


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".json": _guarded(_json),
    ".jsonl": _guarded(_json),
    ".txt": _guarded(_text),
    ".csv": _guarded(_csv),
    ".parquet": _guarded(_parquet),
    ".arrow": _guarded(_arrow),
}
