"""The engine on a CUDA device against plain autograd on the same device: fp32, bf16, compiled, streamed and resident."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from layerferry.backends.cuda import device_count
from layerferry.config import OptimConfig
from layerferry.engine.oracle import loss_and_gradients
from layerferry.models import varlen
from layerferry.objectives import CrossEntropy
from layerferry.plan import FREE_BUDGET, Plan
from tests.conformance.harness import relative
from tests.engine.small import check_parts_in_rounded_waves, check_parts_in_waves_and_on_arrival
from tests.gpu.small import FAMILIES, batches, engine_of, gradients, model_of, twins_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]


def masters_after(steps: int, family: str, plan: Plan) -> list[torch.Tensor]:
    """What some steps in bf16 leave of every parameter."""
    engine = engine_of(model_of(family, torch.bfloat16), plan)
    for number in range(steps):
        engine.step(batches(seed=number), lr=1e-3)
    engine.settle()
    found = [engine.store.master(unit, entry) for unit in engine.store.units for entry in unit.layout.entries]
    engine.close()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_gradients_equal_plain_autograd(family: str) -> None:
    model = model_of(family, torch.float32)
    engine = engine_of(model, Plan(fp32=True, num_slots=2, num_slabs=1, chunk_tokens=100))
    report = engine.step(batches(), CrossEntropy(fused=False), lr=0.0)
    loss, expected = loss_and_gradients(model, batches())
    assert report.loss == pytest.approx(float(loss), rel=1e-5)
    found = gradients(engine)
    # fp32 sums in another order: a few hundred terms at 6e-8 each
    assert max(relative(found[name], expected[name].cpu()) for name in expected) < 1e-4
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_gradients_are_as_close_to_fp32_as_plain_bf16_autograd(family: str, compiled: bool) -> None:
    """With the engine's attention in both: how close that is by itself, ``test_varlen_cuda.py`` asks."""
    exact_model, plain_model = twins_of(family)
    plan = Plan(num_slots=3, compile=compiled, activation_budget=0.5 if compiled else 1.0, chunk_tokens=128)
    engine = engine_of(copy.deepcopy(plain_model), plan)
    assert varlen.use_where_possible(plain_model, plain_model.device) == engine.skeleton.has_varlen
    _, exact = loss_and_gradients(exact_model, batches())
    _, plain = loss_and_gradients(plain_model, batches())
    engine.step(batches(), lr=0.0)
    found = gradients(engine)
    for name in exact:
        own, theirs = relative(found[name], exact[name].cpu()), relative(plain[name].float(), exact[name])
        factor = 1.5 if exact[name].numel() >= 64 else 3.0  # of a few sums with much cancellation, either may be the lucky one
        assert own < factor * theirs + 4e-3, f"{name}: {own:.2e} against {theirs:.2e}"  # one bf16 rounding is 2**-9 = 2e-3
    engine.close()


@pytest.mark.parametrize(("budget", "richer_layers"), [(1.0, 0), (0.5, 0), (0.0, 0), (0.0, 2)])
def test_streamed_equals_resident_bit_for_bit(budget: float, richer_layers: int) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for slots in (2, 5):
            plan = Plan(num_slots=slots, compile=True, activation_budget=budget, richer_layers=richer_layers, richer_budget=0.7)
            found.append(masters_after(3, "llama", plan))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_at_the_host_and_kept_attention_change_no_bit(compiled: bool) -> None:
    """Of layers that are computed again, with their MLP in chunks and whole: the place of the input, and whether attention runs
    once or twice."""
    torch.use_deterministic_algorithms(True)
    shape = {"micro_batch_rows": 4, "row_tokens": 128, "rows_per_step": 12}
    try:
        for chunk in (0, 32):
            found = []
            for inputs, attention in ((0, 1), (2, 2), (99, 99)):
                layers = len(model_of("llama", torch.bfloat16).model.layers)
                plan = Plan(compile=compiled, mlp_chunk_tokens=chunk, **shape)
                plan = replace(plan, host_inputs=min(inputs, layers), kept_attention=min(attention, layers))
                found.append(masters_after(2, "llama", plan))
            assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_state_on_a_disk_changes_no_bit(optim: str, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for on_disk in ((), (2, 3), tuple(range(7))):
            plan = Plan(num_slots=3, compile=True, on_disk=on_disk)
            config = OptimConfig(optim=optim)
            engine = engine_of(model_of("llama", torch.bfloat16), plan, optim=config, disk_folder=tmp_path)
            for number in range(3):
                engine.step(batches(seed=number), lr=1e-3)
            engine.settle()
            masters = []
            for unit in engine.store.units:
                with engine.store.at_hand(unit):
                    masters += [engine.store.master(unit, entry).clone() for entry in unit.layout.entries]
            found.append(masters)
            engine.close()
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_fused_head_equals_the_reference() -> None:
    results = {}
    for fused in (False, True):
        engine = engine_of(model_of("llama", torch.bfloat16), Plan(num_slots=2, chunk_tokens=200))
        report = engine.step(batches(), CrossEntropy(fused=fused), lr=0.0)
        results[fused] = (report.loss, gradients(engine))
        engine.close()
    assert results[True][0] == pytest.approx(results[False][0], rel=1e-4)
    for name, expected in results[False][1].items():
        assert relative(results[True][1][name], expected) < 2e-2, name


def test_a_training_run_learns_and_evaluates() -> None:
    engine = engine_of(model_of("llama", torch.bfloat16), Plan(num_slots=3, compile=True, activation_budget=0.3))
    first = engine.evaluate(batches()).loss
    for _ in range(8):
        engine.step(batches(), lr=1e-3)
    assert engine.evaluate(batches()).loss < first - 0.3
    engine.close()


def test_layers_that_turn_leave_the_same_bits() -> None:
    """Every layer keeps the same share here, so that it is one program wherever it is."""
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for turn in (0, 2, 9):
            plan = Plan(num_slots=5, compile=True, activation_budget=FREE_BUDGET, turn_layers=turn)
            engine = engine_of(model_of("llama", torch.bfloat16), plan)
            seen = [engine.step(batches(seed=number), lr=1e-3) for number in range(3)]
            engine.settle()
            masters = [engine.store.master(u, e) for u in engine.store.units for e in u.layout.entries]
            found.append(([(report.loss, report.grad_norm) for report in seen], masters))
            engine.close()
    finally:
        torch.use_deterministic_algorithms(False)
    for losses, masters in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(masters, found[0][1], strict=True))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_in_parts_are_as_near_to_plain_autograd(family: str) -> None:
    """In fp32, with a part of two experts, and one of each; the sums of a token's experts have another order."""
    model = model_of(family, torch.float32)
    loss, expected = loss_and_gradients(model, batches())
    for parts in (2, 4):
        engine = engine_of(model, Plan(fp32=True, num_slots=2, num_slabs=1, chunk_tokens=100, expert_parts=parts))
        report = engine.step(batches(), CrossEntropy(fused=False), lr=0.0)
        assert report.loss == pytest.approx(float(loss), rel=1e-5)
        found = gradients(engine)
        assert max(relative(found[name], expected[name].cpu()) for name in expected) < 1e-4
        engine.close()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_in_parts_leave_the_same_bits_in_any_slots_and_waves(family: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for slots, waves in ((1, 1), (3, 1), (2, 3)):
            plan = Plan(num_slots=slots, num_waves=waves, resident_gradients=waves > 1, compile=True, expert_parts=2)
            found.append(masters_after(2, family, plan))
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit", "muon", "adafactor"])
def test_experts_in_parts_in_waves_and_on_arrival(optim: str) -> None:
    """gpt-oss, whose tables have biases and lie transposed."""
    model, config = model_of("gpt_oss", torch.bfloat16), OptimConfig(optim=optim)
    plan = Plan(num_slots=2, num_slabs=1, compile=True, expert_parts=2, micro_batch_rows=4, row_tokens=128, rows_per_step=12)
    torch.use_deterministic_algorithms(True)
    try:
        check_parts_in_waves_and_on_arrival(
            lambda changed: engine_of(model, changed, optim=config), plan, lambda step: batches(seed=step), host_inputs=2
        )
    finally:
        torch.use_deterministic_algorithms(False)


def test_experts_in_parts_in_waves_that_are_summed_in_bf16() -> None:
    model, plan = model_of("gpt_oss", torch.bfloat16), Plan(num_slots=2, num_slabs=1, compile=True, expert_parts=2)
    check_parts_in_rounded_waves(lambda changed: engine_of(model, changed), plan, batches())
