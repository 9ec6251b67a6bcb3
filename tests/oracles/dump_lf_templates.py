"""Regenerates ``layerferry/data/templates.json``: the template table of LLaMA-Factory, as it stands after its import.

Run inside an environment that has LLaMA-Factory 0.9.5 (``docs/data.md`` says how to make one): ``python
tests/oracles/dump_lf_templates.py layerferry/data/templates.json``. Facts only are taken: names, slots, stop words, flags,
and the prompts in front of tool lists. How they are put together is our own code, compared with LLaMA-Factory's results by
``lf_goldens.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def slots(formatter: Any) -> list[Any]:
    """A slot is text, ``{"token": name}``, or ``{"special": "bos_token"}`` where LLaMA-Factory has a set of one name."""
    return [{"special": next(iter(slot))} if isinstance(slot, set) else slot for slot in formatter.slots]


def entry(template: Any) -> dict[str, Any]:
    parts = ("user", "assistant", "system", "function", "observation", "prefix")
    found: dict[str, Any] = {"kind": type(template).__name__, "plugin": type(template.mm_plugin).__name__}
    found |= {part: slots(getattr(template, f"format_{part}")) for part in parts}
    found["tool_call_format"] = template.format_function.tool_format
    found["tool_list_format"] = template.format_tools.tool_format
    if found["tool_list_format"] is None:
        found["tool_list_slots"] = slots(template.format_tools)
    found |= {name: list(getattr(template, name)) for name in ("stop_words", "thought_words", "tool_call_words")}
    for name in ("default_system", "efficient_eos", "replace_eos", "replace_jinja_template"):
        found[name] = getattr(template, name)
    return found


def main(path: str) -> None:
    from llamafactory.data import tool_utils
    from llamafactory.data.template import TEMPLATES
    from llamafactory.extras.env import VERSION

    suffix = "_TOOL_PROMPT"
    prompts = {name.removesuffix(suffix).lower(): text for name, text in vars(tool_utils).items() if name.endswith(suffix)}
    table = {
        "source": f"LLaMA-Factory {VERSION} (Apache-2.0)",
        "tool_prompts": prompts,
        "templates": {name: entry(template) for name, template in sorted(TEMPLATES.items())},
    }
    Path(path).write_text(json.dumps(table, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
