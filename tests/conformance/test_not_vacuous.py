"""The conformance suite can fail: without handles, with coarse templates, or with other random numbers it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import layerferry.models.skeleton as skeleton_module
from layerferry.engine.oracle import WholeRows, drawing_by_place, loss_and_gradients
from layerferry.engine.tape import Tape
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import SEED, gradients, make_engine, micro_batches, real_model, seeded, unequal


@contextmanager
def _no_hooks(self: Tape, unit: Any, slot: Any) -> Iterator[None]:
    """Autograd keeps views of the slot, as it would without the tape. (Its version check is off under any hook, so here too.)"""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mixtral", "mamba", "qwen3_next", "gpt2"])
def test_without_handles_the_gradients_are_wrong(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is right, and the backward reads what lies in the forward's slot by then: another layer, or NaN."""
    model = real_model(tiny_config(BY_TYPE[model_type]))
    loss, expected = loss_and_gradients(model, micro_batches())
    engine = make_engine(model, other_slots=True)
    monkeypatch.setattr(Tape, "record", _no_hooks)
    report = engine.step(micro_batches(), WholeRows(), lr=0.0)
    assert report.loss == loss.item()
    worst = max(unequal(gradients(engine), expected).values())
    assert math.isnan(worst) or worst > 1e-3
    engine.close()


@pytest.mark.parametrize("model_type", ["exaone4", "smollm3", "cohere2"])
def test_templates_keyed_by_shape_are_wrong(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shapes_only(layer: torch.nn.Module) -> Any:
        return tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())

    model = real_model(tiny_config(BY_TYPE[model_type]))
    _, expected = loss_and_gradients(model, micro_batches())
    monkeypatch.setattr(skeleton_module, "behaviour_key", shapes_only)
    engine = make_engine(model)
    engine.step(micro_batches(), WholeRows(), lr=0.0)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert max(unequal(gradients(engine), expected).values()) > 1e-3 * largest  # ten thousand roundings
    engine.close()


# -------------------------------------------------------------------- randomness


def dropout_model() -> Any:
    """GPT-2 with dropout after the embedding, in attention, and after each half of a layer."""
    return real_model(tiny_config(BY_TYPE["gpt2"], embd_pdrop=0.2, attn_pdrop=0.2, resid_pdrop=0.2))


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_dropout_is_drawn_by_place(budget: float) -> None:
    """Equal to the whole model whose generator is seeded where the engine's is; a rebuild draws the same numbers again."""
    from dataclasses import replace

    from tests.conformance.harness import PLAN

    model = dropout_model()
    engine = make_engine(model, replace(PLAN, activation_budget=budget))
    for step in range(2):
        with drawing_by_place(model, step=step, seed=SEED):
            loss, expected = loss_and_gradients(model, micro_batches())
        report = engine.step(micro_batches(), WholeRows(), lr=0.0)
        assert report.loss == loss.item()
        assert not unequal(gradients(engine), expected)
    engine.close()


def test_other_random_numbers_would_show() -> None:
    model = dropout_model()
    with seeded(model):
        first, _ = loss_and_gradients(model, micro_batches())
    with drawing_by_place(model, step=1, seed=SEED):
        second, _ = loss_and_gradients(model, micro_batches())
    assert first.item() != second.item()


def test_evaluation_has_no_dropout() -> None:
    model = dropout_model()
    engine = make_engine(model)
    found = engine.evaluate(micro_batches(), WholeRows()).loss
    model.eval()
    loss, _ = loss_and_gradients(model, micro_batches())
    assert found == pytest.approx(loss.item(), rel=4 * 2.0**-24)  # two shares, summed in fp32 there and in fp64 here
    engine.close()
