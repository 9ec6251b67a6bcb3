"""Packed rows by boundaries against packed rows by mask: the same model, the same loss, the same gradients.

torch's kernel runs on devices only, so a plain loop over the samples stands in for it here; the kernel itself is compared
on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layerferry.models import varlen

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def model_of(kind: str, **options: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**TINY, **options}), attn_implementation="sdpa")


def plain_kernel(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """One sample after the other through torch's attention."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0, "what flash kernels take"
    pieces = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if begin == end:
            continue
        q, k, v = (t[begin:end].transpose(0, 1) for t in (query, key, value))
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)[None, :]
        seen = (distance >= 0) & (distance < (window or end))
        pieces.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(pieces)


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def test_boundaries_are_the_starts_of_samples_and_padded_to_one_shape() -> None:
    found = varlen.boundaries(torch.stack([positions(3, 5), positions(8)]))
    assert found[:4].tolist() == [0, 3, 8, 16]
    assert found.numel() == varlen.BOUNDARIES_MULTIPLE and bool((found[3:] == 16).all()) and found.dtype == torch.int32


LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "first_k_dense_replace": 3,
}  # fmt: skip
"""Keys of 12 numbers, values of 8."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("mistral", {"sliding_window": 4}),
        ("qwen3", {"head_dim": 8}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 6}),
        ("mistral", {"sliding_window": 1}),
        ("mistral", {"sliding_window": 64}),
        ("olmo2", {}),
        ("deepseek_v3", LATENT),
    ],
)
def test_the_same_loss_and_gradients_as_with_the_mask(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_kernel", plain_kernel)
    ids = torch.randint(3, 96, (2, 16))
    rows = torch.stack([positions(7, 9), positions(4, 6, 6)])
    results = []
    for packed in (False, True):
        model = model_of(kind, **options)
        if packed:
            assert varlen.use_where_possible(model, CPU)
            starts = varlen.boundaries(rows)
            with varlen.without_mask():
                logits = model(
                    input_ids=ids, position_ids=rows, attention_mask=torch.ones_like(ids), use_cache=False,
                    cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=16, max_length_k=16,
                ).logits  # fmt: skip
        else:
            logits = model(input_ids=ids, position_ids=rows, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        results.append((logits.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    # softmax over the seen keys alone against softmax over all with -inf: the same terms, summed in another order
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    for found, expected in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_unpacked_rows_are_left_to_sdpa_bit_for_bit() -> None:
    ids = torch.randint(3, 96, (2, 16))
    plain, ours = model_of("llama"), model_of("llama")
    assert varlen.use_where_possible(ours, CPU)
    assert torch.equal(plain(input_ids=ids, use_cache=False).logits, ours(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gemma2", {"head_dim": 8}),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
        ("bloom", {}),
        ("llama", {"attention_dropout": 0.1}),
        ("llama", {"head_dim": 264}),
        ("gemma4_text", {"vocab_size_per_layer_input": 96}),
    ],
)
def test_soft_caps_sinks_biases_dropout_and_wide_heads_keep_the_mask(kind: str, options: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**TINY, **options}))
    assert not varlen.use_where_possible(model, CPU)
