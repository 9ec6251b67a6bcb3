"""A step with attention by the flash kernels' algebra, sinks and windows in it, against the family's own function: in fp32 and,
with the kernels' roundings, in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

from layerferry.backends.chaos import ChaosBackend
from layerferry.engine import compiled
from layerferry.engine.batch import MicroBatch
from layerferry.models import varlen
from layerferry.plan import Plan
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import gradients, make_engine, micro_batches, real_model, unequal
from tests.models import sinks_in_products
from tests.models.sinks_in_bf16 import assert_as_close_to_fp32_as_products

BASE = Plan(fp32=True, num_slots=2, num_slabs=1, micro_batch_rows=2, row_tokens=16, rows_per_step=4)

Step = tuple[float, dict[str, Tensor]]


def run(plan: Plan, *, ours: bool = True) -> Step:
    model = real_model(tiny_config(BY_TYPE["gpt_oss"]))
    assert not ours or varlen.use_where_possible(model, torch.device("cpu"))
    engine = make_engine(model, plan, backend=ChaosBackend(0), other_slots=True)
    report = engine.step(micro_batches(2), lr=0.0)
    found = report.loss, gradients(engine)
    engine.close()
    return found


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In fp32 too, for which there are no kernels: there the comparison is of sums, not of roundings to bf16."""
    sinks_in_products.install(monkeypatch)
    monkeypatch.setattr(varlen, "_may_have_sinks", lambda model, device: True)
    monkeypatch.setattr(compiled, "budget_backend", lambda budget: aot_eager_decomp_partition)  # inductor takes 45 s
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("changes", [{}, {"activation_budget": 0.0}, {"compile": True, "activation_budget": 0.3}], ids=str)
def test_loss_and_gradients_are_those_of_the_familys_own_function(changes: dict[str, Any]) -> None:
    own, ours = run(BASE, ours=False), run(replace(BASE, **changes))
    assert ours[0] == pytest.approx(own[0], rel=1e-5)
    for name, expected in own[1].items():
        torch.testing.assert_close(ours[1][name], expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()) + 1e-9)


def test_kept_attention_and_the_place_of_inputs_change_no_bit() -> None:
    base, kept = run(BASE), run(replace(BASE, host_inputs=2, kept_attention=3))
    assert kept[0] == base[0] and not unequal(kept[1], base[1])


def test_in_bf16_it_is_as_close_to_fp32_as_the_familys_own_function() -> None:
    """The twin of ``tests/gpu/test_varlen_cuda.py``."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 64, "sliding_window": 8,
    }  # fmt: skip

    def step(model: Any, given: list[MicroBatch]) -> Step:
        assert varlen.use_where_possible(model, torch.device("cpu"))
        plan = Plan(num_slots=2, num_slabs=1, micro_batch_rows=2, row_tokens=48, rows_per_step=4)
        engine = make_engine(model, plan, backend=ChaosBackend(0), other_slots=True)
        report = engine.step(given, lr=0.0)
        found = report.loss, gradients(engine)
        engine.close()
        return found

    assert_as_close_to_fp32_as_products(step, sizes, torch.device("cpu"), 48)
