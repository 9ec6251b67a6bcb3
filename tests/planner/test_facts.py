"""What is remembered of a trial on ``meta``: equal for equal skeletons, and never another one's."""

from __future__ import annotations

from typing import Any

import pytest

from layerferry.planner import facts
from layerferry.planner.facts import Model
from tests.planner.subjects import skeleton

OTHERS: list[dict[str, Any]] = [{"attention": "eager"}, {"fp32": True}, {"intermediate_size": 96}]


@pytest.mark.parametrize("other", OTHERS)
def test_a_remembered_trial_is_what_a_new_one_finds(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    monkeypatch.setattr(facts, "_TRIALS", {})
    plain, changed = Model.of(skeleton()), Model.of(skeleton(**other))
    assert changed.kept != plain.kept
    again = Model.of(skeleton(**other))
    assert len(facts._TRIALS) == 2
    facts._TRIALS.clear()
    fresh = Model.of(skeleton(**other))
    assert again.kept == fresh.kept == changed.kept and again.rotary_width == fresh.rotary_width
