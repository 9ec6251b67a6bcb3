"""The load-balancing loss of mixture-of-experts families against Hugging Face's own forward.

With the loss asked for, the engine equals the oracle (whose every micro-batch is Hugging Face's ``aux_loss`` over real
tokens, times coefficient and share) to the last bit; and one micro-batch is Hugging Face's own ``loss`` with labels. An expert
that gets no token has a gradient of zeros and its neighbours the right ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layerferry.engine.oracle import WholeRows, loss_and_gradients, step_loss
from layerferry.errors import ModelRefused
from layerferry.models.router_balance import ask_for_balance
from tests.conformance.families import BY_TYPE, FAMILIES, Family, tiny_config
from tests.conformance.harness import PLAN, gradients, make_engine, micro_batches, real_model, seeded, unequal

BALANCED = [family for family in FAMILIES if family.aux_loss]
COEFFICIENT = 0.5
"""Large, so that a wrong gradient cannot hide in rounding."""


def balanced_model(family: Family, **changes: Any) -> Any:
    config = tiny_config(family, **changes)
    ask_for_balance(config, COEFFICIENT)
    return real_model(config)


@pytest.mark.parametrize("family", BALANCED, ids=lambda family: family.model_type)
def test_step_and_evaluation_equal_the_oracle(family: Family) -> None:
    model = balanced_model(family)
    batches = micro_batches(padded=False)
    with seeded(model):
        loss, expected = loss_and_gradients(model, batches)
    engine = make_engine(model)
    assert engine.skeleton.balance is not None and engine.skeleton.balance.coefficient == COEFFICIENT
    report = engine.step(batches, WholeRows(), lr=0.0)
    assert report.loss == loss.item()
    assert not unequal(gradients(engine), expected)
    model.eval()
    with torch.no_grad():
        evaluated = sum(step_loss(model, batch, sum(b.num_targets for b in batches)).item() for batch in batches)
    assert engine.evaluate(batches, WholeRows()).loss == evaluated
    engine.close()


@pytest.mark.parametrize("family", BALANCED, ids=lambda family: family.model_type)
def test_one_micro_batch_is_hugging_faces_own_loss(family: Family) -> None:
    """Both are sums of n positive terms and one product; ours is summed in another order: 2(n + 2) roundings at most."""
    model = balanced_model(family)
    (batch,) = micro_batches(1, padded=False)
    with seeded(model):
        mask = torch.ones_like(batch.input_ids)
        theirs = model(input_ids=batch.input_ids, attention_mask=mask, labels=batch.labels, use_cache=False).loss.item()
        aux = theirs - step_loss(_quiet(model), batch, batch.num_targets).item()
    assert aux > 0.1, "the load-balancing loss is not in Hugging Face's loss: the comparison shows nothing"
    engine = make_engine(balanced_model(family))
    ours = engine.step([batch], lr=0.0).loss
    engine.close()
    assert abs(ours - theirs) <= 2 * (batch.labels.numel() + 2) * 2.0**-24 * theirs


def _quiet(model: Any) -> Any:
    model.config.output_router_logits = False
    return model


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_padding_does_not_count(model_type: str) -> None:
    """A padded row is the same row cut. Padding changes which matrices are multiplied together, so only rounding may differ:
    the bound is 64 units of the largest gradient's fp32 rounding; counted padding would show a thousand times above it."""
    family = BY_TYPE[model_type]
    (whole,) = micro_batches(1, rows=1, padded=False)
    cut = replace(whole, input_ids=whole.input_ids[:, :10], labels=whole.labels[:, :10], lengths=torch.tensor([10]))
    labels = whole.labels.clone()
    labels[:, 10:] = -100
    padded = replace(whole, labels=labels, lengths=torch.tensor([10]))
    found = {}
    for name, batch in {"cut": cut, "padded": padded, "counted": replace(padded, lengths=torch.tensor([16]))}.items():
        engine = make_engine(balanced_model(family))
        engine.step([batch], WholeRows(), lr=0.0)
        found[name] = torch.cat([g.flatten() for n, g in gradients(engine).items() if "gate" in n or "router" in n])
        engine.close()
    bound = 64 * 2.0**-24 * float(found["cut"].abs().max())
    assert float((found["padded"] - found["cut"]).abs().max()) <= bound
    assert float((found["counted"] - found["cut"]).abs().max()) > 1000 * bound


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("num_waves", [1, 2])
def test_plans_do_not_change_it(budget: float, num_waves: int) -> None:
    family = BY_TYPE["qwen3_moe"]
    batches = micro_batches(4, padded=False)
    model = balanced_model(family)
    loss, expected = loss_and_gradients(model, batches)
    engine = make_engine(model, replace(PLAN, activation_budget=budget, num_waves=num_waves, carry_fp32=True))
    report = engine.step(batches, WholeRows(), lr=0.0)
    assert report.loss == pytest.approx(loss.item(), rel=2 * 4 * 2.0**-24)  # four shares in another order
    layers = {name for unit in engine.skeleton.layer_units for name in unit.names.values()}
    found = gradients(engine)
    assert not unequal({n: found[n] for n in layers}, {n: expected[n] for n in layers})
    engine.close()


def test_an_expert_without_tokens_gets_zeros_and_its_neighbours_what_is_theirs() -> None:
    model = real_model(tiny_config(BY_TYPE["mixtral"], num_experts_per_tok=1))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[1] = 0  # never first: of the next two logits one is positive
            layer.mlp.gate.weight[2] = -layer.mlp.gate.weight[3]
    batches = micro_batches()
    loss, expected = loss_and_gradients(model, batches)
    engine = make_engine(model)
    assert engine.step(batches, WholeRows(), lr=0.0).loss == loss.item()
    found = gradients(engine)
    assert not unequal(found, expected)
    idle = [n for n, g in found.items() if ".experts." in n for expert in g if not expert.any()]
    busy = [n for n, g in found.items() if ".experts." in n for expert in g if expert.any()]
    assert idle and busy, "the test needs experts with and without tokens"
    engine.close()


def test_a_family_that_routes_without_such_a_loss_is_refused_when_asked() -> None:
    for model_type in ("deepseek_v3", "llama4_text", "glm4_moe"):
        config = tiny_config(BY_TYPE[model_type])
        config.output_router_logits = True
        with pytest.raises(ModelRefused, match="load-balancing loss"):
            make_engine(real_model(config))


def test_dense_models_ignore_the_wish(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(BY_TYPE["llama"])
    ask_for_balance(config, 0.01)
    assert "no load-balancing loss" in caplog.text
    engine = make_engine(real_model(config))
    assert engine.skeleton.balance is None
    engine.close()


def test_zero_turns_it_off() -> None:
    config = tiny_config(BY_TYPE["mixtral"], output_router_logits=True)
    ask_for_balance(config, None)
    assert config.output_router_logits
    ask_for_balance(config, 0.0)
    assert not config.output_router_logits
