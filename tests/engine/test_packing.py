"""Packed rows: samples that must not see each other do not, and what cannot keep them apart is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from layerferry.engine.batch import IGNORE_INDEX, MicroBatch
from layerferry.engine.engine import Engine
from layerferry.errors import ModelRefused
from layerferry.plan import Plan
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import PLAN, gradients, make_engine, real_model, unequal

LENGTHS = (6, 7, 3)
ATTENTIVE = ["llama", "qwen3", "mistral", "gemma2", "mixtral", "olmo2", "phi3", "gemma3_text"]
RECURRENT = ["mamba", "mamba2", "qwen3_next", "jamba", "lfm2", "falcon_h1", "recurrent_gemma", "gpt_oss"]
"""State that runs on along the row; gpt_oss, because transformers gives its masks no positions."""


def samples(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = 3 + torch.randperm(90, generator=generator)
    return list(ids[: sum(LENGTHS)].split(LENGTHS))


def packed(parts: list[Tensor], *, isolated: bool = True, trained: int | None = None) -> MicroBatch:
    """One row; the first token of each sample has no label, for nothing predicts it. ``trained``: only this sample has any."""
    labels = torch.cat(parts).clone()
    start = 0
    for index, part in enumerate(parts):
        labels[start] = IGNORE_INDEX
        if trained is not None and index != trained:
            labels[start : start + len(part)] = IGNORE_INDEX
        start += len(part)
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    total = torch.tensor([len(labels)])
    ids, labels, positions = (value[None] for value in (torch.cat(parts), labels, positions))
    return MicroBatch(input_ids=ids, labels=labels, lengths=total, position_ids=positions, isolated=isolated)


def engine_of(model_type: str, attention: str = "eager", plan: Plan = PLAN) -> Engine:
    model = real_model(tiny_config(BY_TYPE[model_type]), attention=attention)
    return make_engine(model, plan)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ATTENTIVE)
def test_what_a_sample_says_moves_no_other(model_type: str, attention: str) -> None:
    """Only the middle sample is trained; its neighbours are replaced: loss and every gradient keep every bit. (Experts multiply
    the tokens of all samples together, in matrices whose shapes the neighbours change: there, rounding.)"""
    if model_type == "gemma2":
        attention = "eager"  # it offers no other
    engine = engine_of(model_type, attention)
    parts = samples()
    others = [torch.flip(parts[0], [0]), parts[1], torch.flip(parts[2], [0])]
    found = []
    for row in (parts, others):
        report = engine.step([packed(row, trained=1)], lr=0.0)
        found.append((report.loss, report.grad_norm, gradients(engine)))
    if model_type == "mixtral":
        assert found[0][0] == pytest.approx(found[1][0], rel=16 * 2.0**-24)
        largest = max(float(gradient.abs().max()) for gradient in found[0][2].values())
        assert all(value <= 64 * 2.0**-24 * largest for value in unequal(found[0][2], found[1][2]).values())
    else:
        assert found[0][:2] == found[1][:2]
        assert not unequal(found[0][2], found[1][2])
    engine.close()


def test_without_isolation_it_does_move() -> None:
    engine = engine_of("llama")
    parts = samples()
    others = [torch.flip(parts[0], [0]), parts[1], parts[2]]
    losses = [engine.step([packed(row, isolated=False, trained=1)], lr=0.0).loss for row in (parts, others)]
    assert losses[0] != losses[1]
    engine.close()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_a_packed_row_is_its_samples_one_by_one(model_type: str, budget: float) -> None:
    """The same tokens at the same positions; only matrix shapes differ. The loss is a sum of n positive terms, each computed with
    relative error of some roundings: 4 n roundings bound it. Gradients are held to 64 roundings of the largest."""
    parts = samples()
    engine = engine_of(model_type, plan=replace(PLAN, activation_budget=budget))
    one = engine.step([packed(parts)], lr=0.0)
    together = gradients(engine)
    several = engine.step([replace(packed([part]), position_ids=None, isolated=False) for part in parts], lr=0.0)
    apart = gradients(engine)
    assert one.num_targets == several.num_targets == sum(LENGTHS) - len(LENGTHS)
    assert abs(one.loss - several.loss) <= 4 * sum(LENGTHS) * 2.0**-24 * one.loss
    for name, expected in apart.items():
        assert float((together[name] - expected).abs().max()) <= 64 * 2.0**-24 * max(float(expected.abs().max()), 1e-3), name
    engine.close()


@pytest.mark.parametrize("model_type", RECURRENT)
def test_state_that_runs_on_along_the_row_is_refused(model_type: str) -> None:
    engine = engine_of(model_type)
    with pytest.raises(ModelRefused, match="neat_packing"):
        engine.step([packed(samples())], lr=0.0)
    engine.close()


def test_it_is_refused_whichever_row_is_packed() -> None:
    """A first row with one sample shows nothing; the second row does."""
    row = packed(samples())
    tokens = row.input_ids.shape[1]
    two = MicroBatch(
        input_ids=torch.cat([row.input_ids.flip(1), row.input_ids]),
        labels=torch.cat([row.labels, row.labels]),
        lengths=torch.tensor([tokens, tokens]),
        position_ids=torch.cat([torch.arange(tokens)[None], row.position_ids]),  # type: ignore[list-item]
        isolated=True,
    )
    engine = engine_of("mamba")
    with pytest.raises(ModelRefused, match="neat_packing"):
        engine.step([two], lr=0.0)
    engine.close()


@pytest.mark.parametrize("model_type", RECURRENT)
def test_packing_without_isolation_is_trained(model_type: str) -> None:
    engine = engine_of(model_type)
    report = engine.step([packed(samples(), isolated=False)], lr=0.0)
    assert not report.skipped
    engine.close()
