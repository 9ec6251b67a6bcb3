"""The table of every key: LLaMA-Factory 0.9.5's 343, those of older and newer transformers, and our own.

The table is data (``keys.tsv``, one line a key) because it is read by three: the reader of configuration files, the page in the
documentation, and the reviewer who wants to know what happens to a key. Columns:

type      str, int, float, bool, list (a comma string too), dict (JSON text too), size (60GiB, 24GB, bytes), any; ``?``: or null
default   LLaMA-Factory's, as YAML
status    honoured · replaced (one info line) · harmless (no effect here, silent) · refused (unless it is the default)
field     section.name in ``config.py``; empty where the reader combines several keys; without a dot: another name of that key
accepts   the values that are honoured, where they are few
bounds    least:most, either may be absent
note      why, or what instead

Checked by ``tests/interop/test_keys.py``: against LLaMA-Factory's own list, and against ``config.py``.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

HONOURED, REPLACED, HARMLESS, REFUSED = "honoured", "replaced", "harmless", "refused"

GROUPS = {
    "model": "Model",
    "data": "Data",
    "training": "Training",
    "finetuning": "Fine-tuning",
    "generating": "Generating",
    "transformers": "Keys of older and newer transformers",
    "layerferry": "LayerFerry's own",
}

NESTED_SCHEMA = frozenset(
    {
        *(
            "batching_strategy",
            "dist_config",
            "enable_activation_checkpointing",
            "global_batch_size",
            "init_config",
            "kernel_config",
        ),
        *("lr_scheduler_config", "micro_batch_size", "model", "model_class", "optim_config", "peft_config", "quant_config"),
        *("sample_backend", "save_ckpt_as_hf", "train_dataset"),
    }
)
"""Keys of LLaMA-Factory's other schema (USE_V1=1): refused by name, since a part of it would silently be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One line of the table."""

    key: str
    group: str
    type: str
    default: str
    status: str
    field: str
    accepts: tuple[str, ...]
    bounds: str
    note: str

    @property
    def alias_of(self) -> str | None:
        return self.field if self.field and "." not in self.field else None


@cache
def table() -> dict[str, Key]:
    """Every key, in the order of the file."""
    lines = files("layerferry.interop").joinpath("keys.tsv").read_text(encoding="utf-8").splitlines()
    found: dict[str, Key] = {}
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        columns: dict[str, Any] = {**row, "accepts": tuple(row["accepts"].split())}
        found[row["key"]] = Key(**columns)
    return found


def markdown() -> str:
    """The table as a page of the documentation (``docs/llamafactory-keys.md``)."""
    counts = {status: sum(key.status == status for key in table().values()) for status in (HONOURED, REPLACED, HARMLESS, REFUSED)}
    lines = [
        "# Configuration keys",
        "",
        "<!-- Written by tools/render_keys.py from layerferry/interop/keys.tsv. -->",
        "",
        "Every key that LLaMA-Factory 0.9.5 accepts, with what LayerFerry does with it: "
        + ", ".join(f"{count} {status}" for status, count in counts.items())
        + ".",
        "*Honoured*: does what it says. *Replaced*: one line in the log says what happens instead. *Harmless*: has no effect",
        "here and changes no result. *Refused*: an error with a hint, unless the value is the default.",
        "An unknown key is an error with a suggestion; `ALLOW_EXTRA_ARGS=1` makes it a line in the log.",
    ]
    for group, title in GROUPS.items():
        lines += ["", f"## {title}", "", "| key | default | status | values and notes |", "|---|---|---|---|"]
        lines += [_markdown_row(key) for key in table().values() if key.group == group]
    return "\n".join(lines) + "\n"


def _markdown_row(key: Key) -> str:
    least, _, most = key.bounds.partition(":")
    facts = (
        ", ".join(f"`{value}`" for value in key.accepts),
        " ".join((f"at least {least}" if least else "", f"at most {most}" if most else "")).strip(),
        key.note,
    )
    return f"| `{key.key}` | `{key.default}` | {key.status} | {'; '.join(fact for fact in facts if fact)} |".replace("``", "")
