"""Transposed experts as grouped products against the family's own loop over experts: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerferry.models import experts

TINY = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "vocab_size": 64, "sliding_window": 8,
}  # fmt: skip


def model_of(kind: str, implementation: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**TINY)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=implementation)


def outcome(model: Any, *, compiled: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids = torch.arange(48).view(2, 24) % 64
    run = torch.compile(model, backend="aot_eager") if compiled else model
    loss = run(input_ids=ids, labels=ids, use_cache=False).loss
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_gpt_oss_is_the_loop_over_experts_but_for_the_order_of_sums(compiled: bool) -> None:
    reference, own = model_of("gpt_oss", "eager"), model_of("gpt_oss", "grouped_mm")
    with torch.no_grad():
        for model in (reference, own):
            torch.manual_seed(1)
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
    assert experts.use_where_needed(own) and own.config._experts_implementation == experts.NAME
    (loss, gradients), (expected, wanted) = outcome(own, compiled=compiled), outcome(reference)
    assert torch.allclose(loss, expected, rtol=1e-5)
    for found, right in zip(gradients, wanted, strict=True):
        # sums of a few hundred fp32 terms in another order
        assert torch.allclose(found, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))
    torch.compiler.reset()


def test_an_expert_without_tokens_has_no_gradient_and_harms_none() -> None:
    values = torch.randn(6, 8, requires_grad=True)
    weight = torch.randn(3, 8, 4, requires_grad=True)
    ends = torch.tensor([4, 4, 6], dtype=torch.int32)
    product = experts.grouped(values, weight, ends)
    expected = torch.cat([values[:4] @ weight[0], values[4:] @ weight[2]])
    assert torch.allclose(product, expected, atol=1e-6)
    by_values, by_weight = torch.autograd.grad(product.square().sum(), [values, weight])
    right_values, right_weight = torch.autograd.grad(expected.square().sum(), [values, weight])
    assert torch.allclose(by_values, right_values, rtol=1e-5, atol=1e-5)
    assert torch.allclose(by_weight, right_weight, rtol=1e-5, atol=1e-5) and not by_weight[1].any()


def test_frozen_experts_pass_the_same_gradient_on() -> None:
    weight, ends = torch.randn(3, 8, 4), torch.tensor([4, 4, 6], dtype=torch.int32)
    found = []
    for trained in (True, False):
        values = torch.ones(6, 8, requires_grad=True)
        product = experts.grouped(values, weight.clone().requires_grad_(trained), ends)
        found.append(torch.autograd.grad(product.square().sum(), values)[0])
    assert torch.equal(*found) and found[0].any()


def test_other_families_keep_their_own() -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    small = {key: value for key, value in TINY.items() if key != "num_local_experts"}
    config = CONFIG_MAPPING["qwen3_moe"](**small, num_experts=4, moe_intermediate_size=8)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    assert not experts.use_where_needed(model) and model.config._experts_implementation == "grouped_mm"
    assert not experts.use_where_needed(model_of("gpt_oss", "eager"))
