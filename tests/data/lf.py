"""The goldens that LLaMA-Factory itself made (``tests/oracles/lf_goldens.py``), and our rows in the form our code takes."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from layerferry.data.rows import Conversation, Message

FOLDER = Path(__file__).parents[1] / "goldens/data"
DATE = "01 Jan 2026"
"""The day that the goldens' llama3 tool prompt names."""


@cache
def golden(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def tokenizer() -> Any:
    """A fresh one: templates change their tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(FOLDER / "tokenizer"))


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def conversations() -> list[Conversation]:
    return [conversation(row) for row in golden("rows")]


def conversation(row: dict[str, Any]) -> Conversation:
    return Conversation(
        messages=tuple(Message(role=m["role"], content=m["content"]) for m in row["messages"]),
        system=row.get("system", ""),
        tools=json.dumps(row["tools"], ensure_ascii=False) if "tools" in row else "",
        origin=row["name"],
    )
