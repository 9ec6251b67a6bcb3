"""docs/memory.md is what the planner says (all of it: ``python tools/render_memory.py --check``, too slow for every run)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_planner_says() -> None:
    spec = importlib.util.spec_from_file_location("render_memory", ROOT / "tools" / "render_memory.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = (ROOT / "docs" / "memory.md").read_text()
    assert page.startswith(tool.HEAD + tool.FORMATS_TEXT) and tool.DEVICE_TEXT in page
    for line in tool.format_rows(["Qwen2.5-0.5B"])[2:]:
        same_for_all = not any(word in line for word in ("adafactor", "muon", "arrival"))  # those are a matter of shapes
        assert (line.rsplit("|", 2)[0] if same_for_all else line[:30]) in page
    assert tool.row("Qwen2.5-0.5B") in page
    assert tool.DISK_TEXT in page
    for line in tool.disk_rows(tool.FORMAT_MODELS[:1])[2:]:
        assert line.removesuffix("|") in page
    assert all(f"| {name} |" in page for name in tool.MODELS)
