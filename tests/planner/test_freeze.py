"""Frozen parameters in the plan: bytes as allocated, uploads as fed, model work by formula, seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layerferry.engine.engine import Engine
from layerferry.optim.adamw import AdamW
from layerferry.optim.reference import ReferenceKernels
from layerferry.plan import Plan
from layerferry.planner.choose import decide
from layerferry.planner.estimate import estimate
from layerferry.planner.facts import Model
from layerferry.planner.flops import Flops
from layerferry.planner.held import DEVICE, HOST
from layerferry.planner.memory import items, plan_specs
from layerferry.planner.problem import problem
from layerferry.planner.rate import Rate
from layerferry.planner.report import render
from layerferry.planner.search import search
from layerferry.planner.time import layer_uploads, seconds, uploaded_bytes
from layerferry.planner.working import Shape
from layerferry.store.store import Store
from tests.planner.subjects import QWEN_7B, config, machine, skeleton, specs, uploaded_in_a_step
from tests.planner.test_memory import BUFFERS, CountingBackend
from tests.planner.test_time import batches

WAYS: list[dict[str, Any]] = [
    {"freeze_trainable_layers": 2},
    {"freeze_trainable_layers": -2},
    {"freeze_trainable_layers": 2, "use_llama_pro": True},
    {"freeze_trainable_layers": 1, "freeze_trainable_modules": ("mlp",)},
    {"freeze_trainable_layers": 1, "freeze_extra_modules": ("embed_tokens",)},
    {"freeze_trainable_layers": 0, "freeze_extra_modules": ("model.norm",)},
    {"freeze_trainable_layers": 0, "freeze_extra_modules": ("lm_head",)},
]
LAST_TWO = WAYS[0]
SHAPE = Shape(row_tokens=8, rows_per_step=4)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("home", [(), (0, 2, 4)])
@pytest.mark.parametrize(("waves", "resident", "inputs"), [(1, False, 0), (2, False, 0), (2, True, 3)])
def test_store_and_engine_allocate_what_was_planned(
    way: dict[str, Any], home: tuple[int, ...], waves: int, resident: bool, inputs: int
) -> None:
    built = skeleton("llama", frozen=way, tie_word_embeddings=False)
    plan = Plan(num_slots=3, num_slabs=2, micro_batch_rows=2, rows_per_step=4, on_device=home)
    plan = replace(plan, resident_gradients=resident, num_waves=waves, host_inputs=inputs, row_tokens=SHAPE.row_tokens)
    backend = CountingBackend()
    planned = items(Model.of(built), specs(), plan, SHAPE)
    store = Store(built.units, plan_specs(specs(), plan), backend, on_device=home)
    at_host = [item for item in planned if item.place == HOST]
    of_inputs = sum(item.num_bytes for item in at_host if "inputs" in item.what)
    assert sum(item.num_bytes for item in at_host) - of_inputs == store.num_bytes - backend.device_bytes
    assert (of_inputs > 0) == (inputs > built.reach.num_below)
    Engine(built, store, AdamW(kernels=ReferenceKernels()), backend, plan).close()
    buffers = [i for i in planned if i.place == DEVICE and any(word in i.what for word in BUFFERS) and "working" not in i.what]
    assert sum(item.num_bytes for item in buffers) == backend.device_bytes


@pytest.mark.parametrize("way", [LAST_TWO, WAYS[2], WAYS[5]], ids=str)
@pytest.mark.parametrize("waves", [1, 4])
@pytest.mark.parametrize("slots", [1, 2, 4, 6])
@pytest.mark.parametrize("home", [(), (0, 1)])
def test_uploads_are_those_of_the_feed(slots: int, waves: int, way: dict[str, Any], home: tuple[int, ...]) -> None:
    built = skeleton("llama", frozen=way, num_hidden_layers=6, tie_word_embeddings=home == ())
    plan = Plan(num_slots=slots, num_waves=waves, micro_batch_rows=1, rows_per_step=4, on_device=home)
    assert uploaded_bytes(Model.of(built), plan, specs()) == uploaded_in_a_step(built, plan, batches())


@pytest.mark.parametrize("way", [None, LAST_TWO, WAYS[4], WAYS[6]], ids=str)
@pytest.mark.parametrize("waves", [1, 2])
def test_uploads_of_ends_in_parts_too(way: dict[str, Any] | None, waves: int) -> None:
    built = skeleton("llama", frozen=way, vocab_size=2048, tie_word_embeddings=False)
    plan = Plan(num_slots=2, num_waves=waves, micro_batch_rows=1, rows_per_step=4, end_parts=3)
    assert uploaded_bytes(Model.of(built), plan, specs()) == uploaded_in_a_step(built, plan, batches())


def test_uploads_by_hand() -> None:
    """Ten layers, the last two trained: down, the slots still hold what the backward wants; a second wave starts below."""
    assert layer_uploads(10, 8, 3, 1) == 10 and layer_uploads(10, 8, 1, 1) == 11
    assert layer_uploads(10, 8, 3, 2) == 20 and layer_uploads(10, 8, 8, 2) == 10 + 4 and layer_uploads(10, 8, 10, 5) == 10
    assert layer_uploads(10, 0, 3, 2) == 10 + 7 + 14


def test_model_work_by_closed_formula() -> None:
    """N: forward 2, gradient of the input 2, own gradient 2. Attention: a third forward."""
    hidden, inner, keys, head, width = 32, 48, 16, 96 * 32, 32
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    whole = Flops.of(skeleton("llama", tie_word_embeddings=False)).per_token(64)
    assert whole == 6 * (4 * layer + head) + 4 * 12 * width * 32
    last_two = Flops.of(skeleton("llama", frozen=LAST_TWO, tie_word_embeddings=False))
    assert last_two.per_token(64) == 2 * 2 * layer + 2 * 6 * layer + 4 * head + (2 * 4 + 2 * 12) * width * 32
    pro = Flops.of(skeleton("llama", frozen=WAYS[2], tie_word_embeddings=False))
    assert pro.per_token(64) == (2 + 6 + 4 + 6) * layer + 4 * head + (4 + 3 * 12) * width * 32
    mlp = Flops.of(skeleton("llama", frozen=WAYS[3], tie_word_embeddings=False))
    attention = layer - 3 * hidden * inner
    assert mlp.per_token(64) == 3 * 2 * layer + 6 * layer - 2 * attention + 4 * head + (3 * 4 + 12) * width * 32
    head_alone = Flops.of(skeleton("llama", frozen=WAYS[6], tie_word_embeddings=False))
    assert head_alone.per_token(64) == 4 * 2 * layer + 6 * head + 4 * 4 * width * 32
    assert last_two.whole(64) == whole


def test_activations_below_the_backward_are_not_kept() -> None:
    plan = Plan(micro_batch_rows=4, rows_per_step=4)
    built = Model.of(skeleton("llama", frozen=LAST_TWO))
    kept = [layer.kept for layer in estimate(built, plan, SHAPE).of_layers(built, plan)]
    assert kept[:2] == [0, 0] and min(kept[2:]) > 0


def question(frozen: dict[str, Any] | None, **there: Any) -> Any:
    built = Model.of(skeleton("qwen2", **{**QWEN_7B, "num_hidden_layers": 8}, frozen=frozen))
    return problem(built, specs(), machine(**there), config(rows=32), 1024)


def test_a_step_takes_less_time_and_the_lanes_have_what_is_trained_to_do() -> None:
    plan = Plan(compile=True, activation_budget=0.0, micro_batch_rows=8, rows_per_step=32)
    whole, part = (question(keys) for keys in (None, LAST_TWO))
    there = replace(part.machine, dram_bytes_per_s=Rate(1e30, "copies take nothing from it"))
    full = seconds(whole.model, whole.specs, plan, whole.shape, there)
    last = seconds(part.model, part.specs, plan, part.shape, there)
    assert last.optimizer == pytest.approx(part.model.num_trained * there.optimizer_s_per_param.value)
    assert last.download < 0.3 * full.download and last.upload < 0.75 * full.upload and last.step < 0.6 * full.step
    work = part.model.flops.per_token(1024) / whole.model.flops.per_token(1024)
    assert last.compute / full.compute == pytest.approx(work, rel=0.1)


def test_waits_of_many_waves_with_layers_below_are_finite_and_grow_with_a_slower_link() -> None:
    plan = Plan(compile=True, activation_budget=0.0, micro_batch_rows=8, rows_per_step=32, num_waves=4)
    part = question(LAST_TWO)
    slow = replace(part.machine, upload_together_bytes_per_s=replace(part.machine.upload_bytes_per_s, value=1e9))
    fast, held_up = (seconds(part.model, part.specs, plan, part.shape, one) for one in (part.machine, slow))
    assert fast.waits_for_copies < held_up.waits_for_copies
    bytes_up = uploaded_bytes(part.model, plan, part.specs)
    assert held_up.step >= 0.9 * bytes_up / 1e9, "the link is the limit"


def test_a_model_too_large_to_be_trained_whole_fits_with_most_of_it_frozen() -> None:
    assert not search(question(None, host_gib=24.0, device_gib=10.0))[1]
    part = question(LAST_TWO, host_gib=24.0, device_gib=10.0)
    decision = decide(part)
    assert decision.shortfall is None
    text = render(decision.plan, part)
    assert "(466.1M trained, 15.78%)" in text.splitlines()[0]
    assert decision.plan.on_device, "frozen units come first, and are at home for two bytes a parameter"
