"""The formula of every benchmark row, against closed forms written out by hand."""

from __future__ import annotations

import pytest

from layerferry.planner.flops import Flops, flops_per_token
from tests.planner.subjects import QWEN_7B, skeleton


def test_qwen_7b_is_the_closed_formula() -> None:
    hidden, inner, layers, vocabulary, keys = 3584, 18944, 28, 152064, 512
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    wanted = 6 * (layers * layer + vocabulary * hidden) + 6 * layers * hidden * 1024
    found = flops_per_token(skeleton("qwen2", **{**QWEN_7B, "num_hidden_layers": 1, "vocab_size": 64}), 1024)
    # one layer and a small head are built; layers and head are counted apart, so the whole follows exactly
    assert found == 6 * (layer + 64 * hidden) + 6 * hidden * 1024
    whole = Flops(layer_params=layers * layer, head_params=vocabulary * hidden, attention=((hidden, None),) * layers)
    assert whole.per_token(1024) == wanted
    assert wanted == pytest.approx(43.04e9, rel=1e-3)


def test_a_tied_head_counts_once_and_the_embedding_never() -> None:
    tied = Flops.of(skeleton("llama", tie_word_embeddings=True))
    loose = Flops.of(skeleton("llama", tie_word_embeddings=False))
    assert tied == loose and tied.head_params == 96 * 32


def test_only_chosen_experts_count() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "head_dim": 8}
    found = Flops.of(skeleton("qwen3_moe", **sizes, num_hidden_layers=1))
    attention = 2 * 32 * 32 + 2 * 32 * 16
    assert found.layer_params == attention + 8 * 32 + 2 * 3 * 32 * 24


def test_sliding_windows_count_the_keys_they_see() -> None:
    window = Flops(layer_params=0, head_params=0, attention=((10, 4),))
    # keys seen in a row of 8 by continuous counting: a ramp of 4 and then 4 each: (8 + 16) / 8 = 3
    assert window.per_token(8) == 12 * 10 * 3
    assert window.per_token(4) == Flops(layer_params=0, head_params=0, attention=((10, None),)).per_token(4)


def test_layers_without_attention_have_no_attention_flops() -> None:
    kinds = ["linear_attention", "full_attention"]
    found = Flops.of(skeleton("qwen3_next", num_hidden_layers=2, layer_types=kinds, num_experts=4, head_dim=8))
    assert len(found.attention) == 1
