"""dataset_info.json: names to files, columns and tags, as LLaMA-Factory reads them; and direct paths without a registry.

TRAP: as soon as an entry has ``columns``, every column it does not name is None, defaults included; the same holds for ``tags``
(tests/data/test_registry.py). Ranking data is refused here: the stages below are pt and sft.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from layerferry.data import files
from layerferry.errors import DataError

REGISTRY = "dataset_info.json"
RANKING = "ranking data (chosen and rejected answers) is for preference stages, which are not there: stages are pt and sft"
SOURCES = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
DEFAULT_COLUMNS: dict[str, str | None] = {
    "prompt": "instruction", "query": "input", "response": "output", "history": None, "messages": "conversations",
    "system": None, "tools": None, "images": None, "videos": None, "audios": None,
    "chosen": None, "rejected": None, "kto_tag": None,
}  # fmt: skip
DEFAULT_TAGS: dict[str, str | None] = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt", "observation_tag": "observation",
    "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
OPENAI_TAGS: dict[str, str | None] = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool",
    "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
DIRECT_COLUMNS: dict[str, str | None] = {
    **dict.fromkeys(DEFAULT_COLUMNS),
    **{name: name for name in ("messages", "system", "tools")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One data set: where its rows are and how a row is read."""

    name: str
    path: Path | None = None
    hub: str | None = None
    formatting: str = "alpaca"
    columns: dict[str, str | None] = field(default_factory=lambda: dict(DEFAULT_COLUMNS))
    tags: dict[str, str | None] = field(default_factory=lambda: dict(DEFAULT_TAGS))
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    num_samples: int | None = None
    openai_quirks: bool = False
    """Reproduce LLaMA-Factory's changes to openai rows to the letter (rows.py); ours alone, off."""

    def rows(self, limit: int | None = None) -> Iterator[files.Located]:
        """Located rows, at most ``limit``."""
        if self.path is not None:
            return files.read(self.path, limit)
        return _hub_rows(self, limit)


def resolve(names: tuple[str, ...], dataset_dir: str, *, stage: str) -> list[Entry]:
    """The entries of ``names``: registered names first, else paths of files."""
    if not names:
        raise DataError("no dataset is named: set dataset to a name from dataset_info.json or to a file")
    info = _Registry(dataset_dir)
    return [_checked(info.find(name), stage) for name in names]


class _Registry:
    """dataset_info.json, read once and only if a name is looked up in it."""

    def __init__(self, dataset_dir: str) -> None:
        self.dataset_dir = dataset_dir
        self._table: dict[str, Any] | None = None
        if dataset_dir.startswith("REMOTE:"):
            raise DataError(f"dataset_dir {dataset_dir}: download its {REGISTRY} and point dataset_dir to it")

    @property
    def folder(self) -> Path:
        given = Path(self.dataset_dir)
        return given.parent if given.suffix == ".json" else given

    @property
    def file(self) -> Path:
        given = Path(self.dataset_dir)
        return given if given.suffix == ".json" else given / REGISTRY

    def find(self, name: str) -> Entry:
        if self.dataset_dir == "ONLINE":
            return Entry(name=name, hub=name)
        direct = self._direct_path(name)
        if direct is not None and name not in self._read(missing_ok=True):
            return _direct(name, direct)
        is_path = Path(name).suffix.lower() in files.READERS
        if is_path and not self.file.is_file():
            raise DataError(f"dataset {name}: no such file, and there is no {self.file} either")
        table = self._read(missing_ok=False)
        if name not in table and is_path:
            raise DataError(f"dataset {name}: no such file, and no name in {self.file}")
        if name not in table:
            close = difflib.get_close_matches(name, table, n=1)
            hint = f": did you mean {close[0]}?" if close else f" ({len(table)} names)"
            raise DataError(f"dataset {name} is not in {self.file}{hint}")
        return _entry(name, table[name], self.folder, self.file)

    def _direct_path(self, name: str) -> Path | None:
        if Path(name).suffix.lower() not in files.READERS:
            return None
        for candidate in (Path(name), self.folder / name):
            if candidate.is_file():
                return candidate
        return None

    def _read(self, *, missing_ok: bool) -> dict[str, Any]:
        if self._table is not None:
            return self._table
        if not self.file.is_file():
            if missing_ok:
                return {}
            raise DataError(f"{self.file} does not exist: set dataset_dir to its folder, or dataset to a data file")
        try:
            text = self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text in UTF-8"
            raise DataError(f"{self.file} cannot be read: {reason}") from None
        table = files.parse(text, self.file)
        if not isinstance(table, dict):
            raise DataError(f"{self.file}: an object of data sets is needed, not {type(table).__name__}")
        self._table = table
        return table


def _entry(name: str, given: Any, folder: Path, file: Path) -> Entry:
    where = f"{file}: {name}"
    if not isinstance(given, dict):
        raise DataError(f"{where}: an object is needed")
    sources = [key for key in SOURCES if given.get(key)]
    if not sources:
        raise DataError(f"{where}: none of {', '.join(SOURCES)} is given")
    # LLaMA-Factory prefers the hub where an entry has both; a file at hand needs no network, so it goes first here.
    source = "file_name" if "file_name" in sources else sources[0]
    if source not in ("file_name", "hf_hub_url"):
        raise DataError(f"{where}: {source} is not supported; download the rows and name them with file_name")
    for key in (*SOURCES, "subset", "split", "folder"):
        if given.get(key) and not isinstance(given[key], str):
            raise DataError(f"{where}: {key}: expected text, found {given[key]!r}")
    num_samples = given.get("num_samples")
    if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
        raise DataError(f"{where}: num_samples: expected a whole number above 0, found {num_samples!r}")
    if given.get("ranking"):
        raise DataError(f"{where}: {RANKING}")
    formatting = given.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise DataError(f"{where}: unknown formatting {formatting!r}; known: alpaca, sharegpt, openai")
    return Entry(
        name=name,
        path=folder / given["file_name"] if source == "file_name" else None,
        hub=given["hf_hub_url"] if source == "hf_hub_url" else None,
        formatting=formatting,
        columns=_mapping(given, "columns", DEFAULT_COLUMNS, where),
        tags=_mapping(given, "tags", DEFAULT_TAGS, where),
        subset=given.get("subset"),
        split=given.get("split", "train"),
        folder=given.get("folder"),
        num_samples=num_samples,
        openai_quirks=bool(given.get("openai_quirks", False)),
    )


def _mapping(given: dict[str, Any], key: str, defaults: dict[str, str | None], where: str) -> dict[str, str | None]:
    if key not in given:
        return dict(defaults)
    named = given[key]
    if not isinstance(named, dict):
        raise DataError(f"{where}: {key} is not an object")
    unknown = sorted(set(named) - set(defaults))
    if unknown:
        close = difflib.get_close_matches(unknown[0], defaults, n=1)
        raise DataError(f"{where}: unknown {key[:-1]} {unknown[0]}" + (f": did you mean {close[0]}?" if close else ""))
    for name, value in named.items():
        if value is not None and not isinstance(value, str):
            wanted = "the name of a column" if key == "columns" else "the text of a tag"
            raise DataError(f"{where}: {key}: {name}: expected {wanted}, found {value!r}")
    return {**dict.fromkeys(defaults), **named}


def _direct(name: str, path: Path) -> Entry:
    """A file without a registry: its first row says what it is."""
    first = next(files.read(path, 1), None)
    if first is None:
        raise DataError(f"{path} has no rows")
    origin, row = first
    if not isinstance(row, dict):
        raise DataError(f"{origin}: the first row is not an object, so its columns are not known")
    keys = set(row)
    if {"chosen", "rejected"} <= keys:
        raise DataError(f"{path}: {RANKING}")
    if "messages" in keys:
        return Entry(name=name, path=path, formatting="openai", columns=dict(DIRECT_COLUMNS), tags=dict(OPENAI_TAGS))
    if "conversations" in keys:
        columns = {**DIRECT_COLUMNS, "messages": "conversations"}
        return Entry(name=name, path=path, formatting="sharegpt", columns=columns)
    if {"prompt", "completion"} <= keys:
        return Entry(name=name, path=path, formatting="prompt_completion", columns=dict(DIRECT_COLUMNS), tags=dict(OPENAI_TAGS))
    if {"instruction", "output"} <= keys:
        return Entry(name=name, path=path, columns={**DEFAULT_COLUMNS, "system": "system", "history": "history"})
    if "text" in keys:
        return Entry(name=name, path=path, formatting="text", columns=dict(DIRECT_COLUMNS))
    raise DataError(
        f"{origin}: no known columns among {', '.join(sorted(keys)) or 'none'}: messages, conversations, prompt and completion, "
        f"instruction and output, or text; otherwise register the file in {REGISTRY}"
    )


def _checked(entry: Entry, stage: str) -> Entry:
    if entry.columns["kto_tag"]:
        raise DataError(f"dataset {entry.name}: kto data is for stage kto, which is not there")
    if entry.formatting == "text" and stage != "pt":
        raise DataError(f"dataset {entry.name} has only text, no answers: use stage: pt")
    if stage == "pt" and entry.formatting == "alpaca":  # the text is the prompt; answers and history are not looked at
        return replace(entry, columns={**entry.columns, "response": None, "history": None})
    return entry


def _hub_rows(entry: Entry, limit: int | None) -> Iterator[files.Located]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(f"dataset {entry.name}: {entry.hub} needs the hub's library: pip install datasets") from None
    try:
        table = load_dataset(entry.hub, name=entry.subset, data_dir=entry.folder, split=entry.split)
    except Exception as error:  # the library raises its own, requests' and huggingface_hub's errors alike
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"dataset {entry.name}: {entry.hub} cannot be had from the hub: {reason[0]}") from None
    for number, row in enumerate(table):
        if limit is not None and number >= limit:
            return
        yield f"{entry.hub}, row {number + 1}", row
