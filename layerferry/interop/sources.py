"""Settings with the place they come from: a YAML or JSON file, and ``key=value`` items of the command line over it.

OmegaConf reads, as it does for LLaMA-Factory (PyYAML alone reads ``1e-5`` as a string, and keeps the last of two equal keys in
silence); PyYAML's node tree tells the lines, so that every error can name one. Nothing here knows which keys there are.
Checked by ``tests/interop/test_sources.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerferry.errors import ConfigError

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was written, and where: ``file:line`` or the command line."""

    value: Any
    where: str


def read_settings(path: Path | None, overrides: Sequence[str]) -> dict[str, Setting]:
    """Key to setting; the command line wins. Any input that cannot be read is a ``ConfigError``."""
    from omegaconf import OmegaConf

    written: dict[str, Any] = {}
    lines: dict[str, int] = {}
    if path is not None:
        written, lines = _read_file(path)
    given = [_checked(item) for item in overrides]
    for item in given:
        try:
            OmegaConf.from_dotlist([item])
        except Exception as error:  # YAML of the value, as below
            raise ConfigError(f"{COMMAND_LINE}: {item!r} cannot be read: {_one_line(error)}") from error
    try:
        merged = OmegaConf.merge(OmegaConf.create(written), OmegaConf.from_dotlist(given))
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except Exception as error:  # interpolation, YAML inside an override, nesting too deep: all are what the user wrote
        raise ConfigError(f"{path or COMMAND_LINE}: {_one_line(error)}") from error
    assert isinstance(values, dict)
    overridden = {item.split("=", 1)[0].split(".")[0].split("[")[0] for item in given}
    return {
        str(key): Setting(value, COMMAND_LINE if key in overridden else f"{path}:{lines.get(str(key), 1)}")
        for key, value in values.items()
    }


def _checked(item: str) -> str:
    key, equals, _ = item.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{COMMAND_LINE}: {item!r} is not key=value")
    return item


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Values and the line of each key. A key that stands twice is an error naming both lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file in UTF-8"
        raise ConfigError(f"{path}: cannot read the configuration: {reason}") from error
    if path.suffix.lower() == ".json":
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            place = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
            raise ConfigError(f"{place}: not valid JSON: {_one_line(error)}") from error
        text = text.replace("\t", " ")  # JSON is YAML but for tabs between tokens; inside strings JSON forbids them
    lines = _key_lines(path, text)
    from omegaconf import OmegaConf

    try:
        loaded = OmegaConf.create(text)
        values = OmegaConf.to_container(loaded, resolve=False)
    except Exception as error:  # whatever the YAML reader met (a tag, a bad number, nesting too deep), the user wrote
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected key: value lines, found a list")
    return {str(key): value for key, value in values.items()}, lines


def _key_lines(path: Path, text: str) -> dict[str, int]:
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem or _one_line(error)}") from error
    except Exception as error:  # forbidden characters, nesting too deep
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected key: value lines")
    lines: dict[str, int] = {}
    for key_node, _ in root.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{key_node.start_mark.line + 1}: a key must be a plain word")
        line = key_node.start_mark.line + 1
        if key_node.value in lines:
            raise ConfigError(f"{path}:{line}: duplicate key {key_node.value!r}, first on line {lines[key_node.value]}")
        lines[key_node.value] = line
    return lines


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
