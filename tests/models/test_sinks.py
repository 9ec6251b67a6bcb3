"""Attention with sinks: the algebra around torch's kernels, and families against transformers' own function.

The kernels run on devices only; plain products stand in their place. What they do on a device is tried by ``work_on``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library

from layerferry.models import sinks, varlen
from layerferry.models.attention_outputs import AttentionOutputs
from tests.models.sinks_in_products import install, plain_kernel

CPU = torch.device("cpu")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def random(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(True) for shape in shapes]


@pytest.mark.parametrize("window", [None, 3])
def test_output_and_gradients_are_those_of_autograd_through_products(plain: None, window: int | None) -> None:
    query, key, value, sink = given = random((12, 4, 8), (12, 2, 8), (12, 2, 8), (4,))
    starts = torch.tensor([0, 5, 12, 12], dtype=torch.int32)
    (slope,) = random((12, 4, 8))
    found = sinks.attend(query, key, value, sink, starts, 7, 0.3, window)
    expected = sinks.in_products(query, key, value, sink, starts, 0.3, window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for own, other in zip(torch.autograd.grad(found, given, slope), torch.autograd.grad(expected, given, slope), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


def test_the_operator_is_what_torch_expects_of_one(plain: None) -> None:
    query, key, value, sink = random((12, 4, 8), (12, 2, 8), (12, 2, 8), (4,))
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(sinks._with_sinks, (query, key, value, sink, starts, 7, 0.3, 0), test_utils=tests)


TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "max_position_embeddings": 64,
    "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "mimo_v2_flash": {
        "v_head_dim": 6,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 6,
    },
}


def model_of(kind: str, dtype: torch.dtype, **options: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**TINY, **OWN.get(kind, {}), **options}), dtype=dtype)
    assert model.config._attn_implementation == "eager"
    return model.train()


def known_families() -> list[str]:
    from transformers import CONFIG_MAPPING

    return [kind for kind in sinks.FAMILIES if kind in CONFIG_MAPPING]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in known_families()),
        ("gpt_oss", {"sliding_window": 1}),
        ("gpt_oss", {"sliding_window": 64, "num_key_value_heads": 1, "head_dim": 6}),
    ],
)
def test_families_give_the_loss_and_gradients_of_their_own_function(
    kind: str, options: dict[str, Any], plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, which the models are taken for bf16 to be switched."""
    monkeypatch.setattr(type(model_of(kind, torch.float32, **options)), "dtype", torch.bfloat16)
    ids, results = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1)), []
    for ours in (False, True):
        model = model_of(kind, torch.float32, **options)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.data.normal_()
        if ours:
            assert varlen.use_where_possible(model, CPU) and varlen.uses_varlen(model)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        results.append((logits.detach(), [g for g in found if g is not None]))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=1e-5)
    assert len(results[0][1]) == len(results[1][1])
    for own, expected in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-6)


def test_packed_samples_do_not_see_each_other(plain: None) -> None:
    """Which no mask of transformers keeps them from in this family."""
    model = model_of("gpt_oss", torch.bfloat16)
    assert varlen.use_where_possible(model, CPU)
    rows = torch.cat([torch.arange(7), torch.arange(9)])[None]
    ids = torch.randint(3, 96, (1, 16), generator=torch.Generator().manual_seed(1))
    starts = varlen.boundaries(rows)
    spans = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 16, "max_length_k": 16}
    together = model(input_ids=ids, position_ids=rows, use_cache=False, **spans).logits
    alone = [model(input_ids=ids[:, part], use_cache=False).logits for part in (slice(0, 7), slice(7, 16))]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=0.02, atol=0.02)  # bf16


def test_what_the_kernels_gave_answers_a_second_forward(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, outputs = torch.nn.Identity(), AttentionOutputs()
    outputs.watch(layer)
    query, key, value, sink = random((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), (4,))
    options = {"scaling": 0.3, "s_aux": sink}
    results: list[tuple[Any, ...]] = []
    with outputs.recording(results):
        first, _ = varlen.attention(layer, query, key, value, None, **options)
    monkeypatch.setattr(sinks, "kernel", None)  # would fail
    with outputs.answering(results):
        second, _ = varlen.attention(layer, query, key, value, None, **options)
    assert torch.equal(first, second)
    slope = torch.ones_like(first)
    given = (query, key, value, sink)
    for own, again in zip(torch.autograd.grad(first, given, slope), torch.autograd.grad(second, given, slope), strict=True):
        assert torch.equal(own, again)


def test_without_kernels_or_in_fp32_the_family_keeps_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sinks.work_on(CPU, 64)
    assert not varlen.use_where_possible(model_of("gpt_oss", torch.bfloat16), CPU)
    monkeypatch.setattr(sinks, "work_on", lambda device, width: True)
    assert not varlen.use_where_possible(model_of("gpt_oss", torch.float32), CPU)
    monkeypatch.setattr(sinks, "FAMILIES", ())
    assert not varlen.use_where_possible(model_of("gpt_oss", torch.bfloat16), CPU)


def test_the_trial_tells_right_from_wrong(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(sinks._error(CPU, 8, window) for window in (None, 5)) < sinks._TRIAL_ERROR
    monkeypatch.setattr(sinks, "kernel", lambda *given: plain_kernel(*given[:-1], 4))
    assert sinks._error(CPU, 8, None) > 5 * sinks._TRIAL_ERROR
