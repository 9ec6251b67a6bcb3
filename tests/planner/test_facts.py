"""What is remembered of a trial on ``meta``: equal for equal skeletons, and never another one's; and what a trial finds."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from layerferry.engine.experts_in_parts import refuse_undividable_layers
from layerferry.errors import PlanError
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


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda moe, hidden, routed: moe.experts(hidden, *routed) + moe.experts(hidden, *routed), "runs twice in a layer"),
        (
            lambda moe, hidden, routed: moe.experts(hidden[None], *routed)[0],
            r"called with \[\(1, 64, 32\), \(64, 2\), .*not hidden",
        ),
        (lambda moe, hidden, routed: hidden, "a layer ran without its experts"),
    ],
)
def test_experts_that_cannot_be_run_apart_are_known_before_a_plan(
    answer: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    assert Model.of(skeleton("qwen3_moe", **sizes)).undividable_layers is None
    monkeypatch.setattr(facts, "_TRIALS", {})

    def forward(moe: Any, hidden: Tensor) -> Any:
        flat = hidden.flatten(0, 1)
        _, weights, index = moe.gate(flat)
        return answer(moe, flat, (index, weights)).view_as(hidden)

    monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", forward)
    found = Model.of(skeleton("qwen3_moe", **sizes)).undividable_layers
    with pytest.raises(PlanError, match=rf"^expert_parts: 4: qwen3_moe: Qwen3MoeExperts: {reason}.*: expert_parts: 1 feeds its"):
        refuse_undividable_layers(4, "qwen3_moe", found)
