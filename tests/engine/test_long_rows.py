"""Layers that are computed again with token-wise parts in chunks and attention kept: eager and compiled, bits and roundings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerferry.backends.chaos import ChaosBackend
from layerferry.engine import compiled
from layerferry.errors import PlanError
from layerferry.models import or_eager
from layerferry.models.attention_outputs import AttentionOutputs
from layerferry.models.varlen import use_where_possible
from layerferry.plan import Plan
from tests.conformance.harness import gradients, make_engine, micro_batches, unequal
from tests.engine.small import small_model
from tests.models.attention_kernels import Kernels

BASE = Plan(fp32=True, num_slots=2, num_slabs=1, micro_batch_rows=2, row_tokens=16, rows_per_step=4)


def ours(**changes: Any) -> Any:
    """A model whose attention comes through our interface."""
    model = small_model(attention="sdpa", layers=3, **changes)
    assert use_where_possible(model, torch.device("cpu"))
    return model


def run(plan: Plan, model: Any, *, chaos: int = 0) -> tuple[float, dict[str, Tensor]]:
    engine = make_engine(model, plan, backend=ChaosBackend(chaos), other_slots=True)
    report = engine.step(micro_batches(2), lr=0.0)
    found = report.loss, gradients(engine)
    engine.close()
    return found


def close(one: dict[str, Tensor], other: dict[str, Tensor], *, roundings: int = 64) -> bool:
    """Within some roundings of fp32 of each tensor's largest value: the same sums in another order."""
    return all(
        bool(((one[n] - other[n]).abs() <= roundings * 2.0**-24 * one[n].abs().max()).all()) for n in one.keys() | other.keys()
    )


@pytest.fixture(scope="module")
def reference() -> tuple[float, dict[str, Tensor]]:
    return run(BASE, ours())


@pytest.mark.parametrize("host_inputs", [0, 2, 3])
@pytest.mark.parametrize("kept_attention", [1, 3])
def test_attention_that_is_kept_changes_no_bit(host_inputs: int, kept_attention: int, reference: Any) -> None:
    loss, found = run(replace(BASE, host_inputs=host_inputs, kept_attention=kept_attention), ours(), chaos=host_inputs)
    assert loss == reference[0] and not unequal(found, reference[1])


@pytest.mark.parametrize("kept_attention", [0, 1, 3])
def test_kept_attention_is_computed_once(kept_attention: int) -> None:
    engine = make_engine(ours(), replace(BASE, host_inputs=3, kept_attention=kept_attention))
    with Kernels() as kernels:
        engine.step(micro_batches(2), lr=0.0)
    engine.close()
    assert kernels.count == 2 * (3 + 3 - kept_attention)


def test_attention_that_does_not_come_through_us_is_refused() -> None:
    with pytest.raises(PlanError, match="kept_attention: 1: the attention of llama"):
        make_engine(small_model(), replace(BASE, kept_attention=1))


@pytest.mark.parametrize("chunk_tokens", [4, 7])
def test_chunks_change_rounding_only_and_the_place_of_inputs_nothing(chunk_tokens: int, reference: Any) -> None:
    plan = replace(BASE, mlp_chunk_tokens=chunk_tokens)
    loss, found = run(plan, ours())
    assert loss == pytest.approx(reference[0], rel=64 * 2.0**-24) and close(found, reference[1])
    for changed in ({"host_inputs": 2}, {"host_inputs": 3, "kept_attention": 2}, {"num_slots": 4}):
        other_loss, other = run(replace(plan, **changed), ours(), chaos=1)
        assert other_loss == loss and not unequal(other, found)


def test_a_part_that_is_left_whole_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    or_eager.say_once.cache_clear()
    model = small_model(model_type="mixtral")
    with caplog.at_level(logging.WARNING):
        loss, found = run(replace(BASE, mlp_chunk_tokens=4), model)
    said = [r.getMessage() for r in caplog.records if "chunks" in r.getMessage()]
    assert said == [
        "MixtralDecoderLayer.mlp is not run in chunks of tokens: it has experts, whose tokens are gathered over the whole row"
    ]
    expected_loss, expected = run(BASE, model)
    assert loss == pytest.approx(expected_loss, rel=64 * 2.0**-24) and close(found, expected)


# -------------------------------------------------------------------- compiled


@pytest.fixture
def ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo's graphs and breaks and AOT autograd's partition as on a device, with eager kernels instead of inductor's."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    torch.compiler.reset()
    monkeypatch.setattr(compiled, "budget_backend", lambda budget: aot_eager_decomp_partition)
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "changes",
    [
        {"host_inputs": 3},
        {"host_inputs": 2, "kept_attention": 3},
        {"host_inputs": 2, "mlp_chunk_tokens": 4},
        {"host_inputs": 1, "kept_attention": 2, "mlp_chunk_tokens": 4},
    ],
)
def test_compiled_layers_are_computed_again_as_well(changes: dict[str, Any], ahead_of_time: None, reference: Any) -> None:
    torch._dynamo.utils.counters.clear()
    loss, found = run(replace(BASE, compile=True, **changes), ours())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    assert loss == pytest.approx(reference[0], rel=64 * 2.0**-24) and close(found, reference[1], roundings=128)


def test_compiled_attention_is_answered_with_what_was_recorded(ahead_of_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two of three layers and two micro-batches: one kernel's results each, all of them taken."""
    engine = make_engine(ours(), replace(BASE, compile=True, host_inputs=3, kept_attention=2))
    answering, given = AttentionOutputs.answering, []

    def counting(self: AttentionOutputs, results: Any) -> Any:
        given.append(len(results))
        return answering(self, results)

    monkeypatch.setattr(AttentionOutputs, "answering", counting)
    engine.step(micro_batches(2), lr=0.0)
    engine.close()
    assert given == [1] * 4
