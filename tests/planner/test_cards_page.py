"""docs/cards.md is what the planner says (all of it: ``python tools/render_cards.py --check``, some minutes)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from layerferry.planner.facts import Model
from layerferry.planner.held import DEVICE, HOST

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cards.md").read_text(encoding="utf-8")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("render_cards")


def test_every_card_beside_every_host_is_there(tool: Any) -> None:
    assert PAGE.startswith(tool.HEAD) and "| `7b-free` |" in PAGE
    for title in tool.FORMATS:
        found = tool.cells(PAGE, title)
        assert list(found) == [card.name for card in tool.CARDS]
        assert all(len(row) == len(tool.HOSTS) for row in found.values())
        assert {cell.split(",")[0] for row in found.values() for cell in row} <= {*tool.MODELS, "none of them"}
    assert tool.readme(PAGE) == tool.README.read_text(encoding="utf-8"), "its table is part of the page"
    assert list(tool.measured())[2:] == PAGE.split("\n\n")[-1].strip().splitlines()[2:]


@pytest.mark.parametrize("card", [0, 1])
def test_a_cell_is_a_plan_that_fits(tool: Any, card: int) -> None:
    """Cells with the smallest model, to be quick; seconds as rounded there."""
    title, optim = next(iter(tool.FORMATS.items()))
    name, _, seconds = tool.cells(PAGE, title)[tool.CARDS[card].name][0].partition(", ")
    plan = tool.planned(name, tool.CARDS[card], tool.HOSTS[0], optim)
    assert plan.total(HOST) <= tool.HOSTS[0].gb * 1e9 and plan.total(DEVICE) <= tool.CARDS[card].gb * 1e9
    assert plan.seconds.step == pytest.approx(float(seconds.removesuffix(" s")), rel=0.1)


def test_a_model_whose_planes_are_too_many_is_not_planned(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small: Model = tool.model_of("Qwen2.5-0.5B")
    monkeypatch.setattr(tool, "model_of", lambda _: small)
    monkeypatch.setattr(tool, "decide", lambda _: pytest.fail("planned"))
    tiny = tool.Host(gb=1, dram=1e9, cores=1)
    assert (
        tool.planned("any", tool.Card(name="", gb=1, matmul=1.0, link=1.0, memory=1.0, free_gib=1.0), tiny, tool.OptimConfig())
        is None
    )
