"""Every family of the list, streamed through two slots of the chaos backend, against plain autograd: equal to the last bit.

Released slots hold NaN and copies land late, so nothing of this can pass by luck; ``test_not_vacuous.py`` shows that it
fails without handles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layerferry.engine.oracle import WholeRows, loss_and_gradients
from tests.conformance.families import FAMILIES, Family, tiny_config
from tests.conformance.harness import PLAN, gradients, make_engine, micro_batches, real_model, relative, seeded, unequal

UNIT_ROUNDOFF = 2.0**-24


def offers_sdpa(family: Family) -> bool:
    from transformers import AutoModelForCausalLM

    from layerferry.models.build import build_on_meta

    assert AutoModelForCausalLM is not None
    return bool(type(build_on_meta(tiny_config(family), dtype=torch.float32))._supports_sdpa)


def attentions(family: Family) -> list[str]:
    return ["eager", "sdpa"] if offers_sdpa(family) else ["eager"]


BY_POWER = {"gemma4_text"}
"""Their norm is a ``torch.pow`` of every row, whose bits are others behind the last whole vector: another number of rows, as the
head over trained rows alone has it, changes the last bits."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_loss_and_every_gradient_equal_autograd(family: Family) -> None:
    for attention in attentions(family):
        model: Any = real_model(tiny_config(family), attention=attention)
        batches = micro_batches(rows=family.rows)
        with seeded(model):
            loss, expected = loss_and_gradients(model, batches)
        engine = make_engine(model, other_slots=True)
        report = engine.step(batches, WholeRows(), lr=0.0)
        assert report.loss == loss.item(), attention
        assert not unequal(gradients(engine), expected), attention
        # The engine's own objective sums the loss over trained tokens only. Both are sums of n positive terms, each within
        # (n - 1) roundings of the exact sum; plus one for the division. Its head has the trained rows alone.
        num_terms = sum(batch.labels.numel() for batch in batches)
        own = engine.step(batches, lr=0.0)
        assert abs(own.loss - report.loss) <= 2 * (num_terms + 1) * UNIT_ROUNDOFF * report.loss, attention
        found = gradients(engine)
        for name in (name for unit in engine.skeleton.layer_units for name in unit.names.values()):
            assert relative(found[name], expected[name]) <= (1e-6 if family.model_type in BY_POWER else 0.0), (attention, name)
        engine.close()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_bf16_gradients_are_the_fp32_sum_rounded_once(family: Family) -> None:
    model = real_model(tiny_config(family), dtype=torch.bfloat16)
    batches = micro_batches(rows=family.rows)
    with seeded(model):
        loss, expected = loss_and_gradients(model, batches)
    engine = make_engine(model, replace(PLAN, fp32=False), other_slots=True)
    report = engine.step(batches, WholeRows(), lr=0.0)
    assert report.loss == loss.item()
    wide = {u.names[e.name] for u in engine.store.units for e in u.layout.entries if e.dtype == torch.float32}
    rounded = {n: g if n in wide else g.bfloat16().float() for n, g in expected.items()}
    assert not unequal(gradients(engine), rounded)
    engine.close()
