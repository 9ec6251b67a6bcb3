"""From what YAML gave to what a key's type asks for; a wrong value is a ``ValueError`` that says what was expected.

Wider than YAML where people are: numbers and booleans in quotes (environment variables arrive so), comma lists, JSON text for
mappings, ``no`` and ``off`` where a word was meant and YAML read a boolean. Never wider in meaning: 1.5 is no integer.
Checked by ``tests/interop/test_values.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from layerferry.interop.keys import Key

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_FACTORS = {"b": 1} | {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_FACTORS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}


def convert(key: Key, value: Any) -> Any:
    """``value`` as ``key.type``, inside ``key.accepts`` and ``key.bounds``."""
    kind = key.type.rstrip("?")
    if key.accepts and value is False and "no" in key.accepts:
        value = "no"  # YAML 1.1 reads a bare no as false
    converted = _CONVERTERS[kind](value)
    if key.accepts and converted not in key.accepts:
        hint = f" ({key.note})" if key.note else ""
        raise ValueError(f"{converted!r} is not supported: {', '.join(key.accepts)}{hint}")
    least, _, most = key.bounds.partition(":")
    if (least and converted < float(least)) or (most and converted > float(most)):
        wanted = " and ".join(part for part in (f"at least {least}" if least else "", f"at most {most}" if most else "") if part)
        raise ValueError(f"expected {wanted}, found {converted!r}")
    return converted


def to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in {"true", "yes", "on"}:
        return True
    if isinstance(value, str) and value.strip().lower() in {"false", "no", "off"}:
        return False
    raise ValueError(f"expected true or false, found {value!r}")


def to_float(value: Any) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError(f"expected a number, found {value!r}")


def to_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        number = to_float(value)
    except ValueError:
        number = math.nan
    if number != number or number != int(number):
        raise ValueError(f"expected a whole number, found {value!r}")
    return int(number)


def to_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # a run name such as 7
    raise ValueError(f"expected text, found {value!r}")


def to_list(value: Any) -> tuple[str, ...]:
    """``a,b`` or a YAML list."""
    items = value if isinstance(value, list | tuple) else to_str(value).split(",")
    return tuple(text for text in (to_str(item).strip() for item in items) if text)


def to_dict(value: Any) -> dict[str, Any]:
    """A mapping, or one as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"expected a mapping or JSON text of one, found {value!r}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping, found {value!r}")
    return {str(key): item for key, item in value.items()}


def to_size(value: Any) -> int:
    """Bytes of ``60GiB``, ``24GB``, ``1000``."""
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value).strip())
    if match is not None:
        size_bytes = float(match.group(1)) * _FACTORS[(match.group(2) or "B").lower()]
        if math.isfinite(size_bytes) and size_bytes >= 1:
            return int(size_bytes)
    raise ValueError(f"expected a size such as 60GiB, 24GB or a number of bytes, found {value!r}")


def as_is(value: Any) -> Any:
    return value


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "any": as_is,
    "bool": to_bool,
    "dict": to_dict,
    "float": to_float,
    "int": to_int,
    "list": to_list,
    "size": to_size,
    "str": to_str,
}
