"""Predicted seconds: upload counts against the engine's own feed, lanes against arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layerferry.backends.cpu import CpuBackend
from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import Engine
from layerferry.optim.adamw import AdamW
from layerferry.optim.reference import ReferenceKernels
from layerferry.plan import Plan
from layerferry.planner.facts import Model
from layerferry.planner.memory import Shape
from layerferry.planner.time import compute_share, seconds, uploaded_bytes
from layerferry.store.store import Store
from tests.planner.subjects import machine, skeleton, specs

SHAPE = Shape(row_tokens=8, rows_per_step=4)


def batches() -> list[MicroBatch]:
    ids = torch.arange(8).expand(1, 8).contiguous()
    return [MicroBatch(input_ids=ids, labels=ids, lengths=torch.tensor([8])) for _ in range(4)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("home", [(), (0, 1, 2)])
def test_uploads_are_those_of_the_feed(slots: int, waves: int, tied: bool, home: tuple[int, ...]) -> None:
    built = skeleton("llama", num_hidden_layers=5, tie_word_embeddings=tied)
    plan = Plan(num_slots=slots, num_waves=waves, micro_batch_rows=1, rows_per_step=4, on_device=home)
    store = Store(built.units, specs(), CpuBackend(), on_device=home)
    engine = Engine(built, store, AdamW(kernels=ReferenceKernels()), CpuBackend(), plan)
    try:
        engine.step(batches(), lr=0.0)
        before = engine.feed.uploaded_bytes
        engine.step(batches(), lr=0.0)
        assert uploaded_bytes(Model.of(built), plan, specs()) == engine.feed.uploaded_bytes - before
    finally:
        engine.close()


def test_lanes_are_work_over_rate() -> None:
    model, there = Model.of(skeleton("llama")), machine()
    plan = Plan(compile=True, activation_budget=0.0, micro_batch_rows=4, rows_per_step=4)
    found = seconds(model, specs(), plan, SHAPE, there)
    assert found.compute == pytest.approx(model.flops.per_token(8) * 32 / (715e12 * 0.72))
    assert found.optimizer == pytest.approx(model.num_params * 0.26e-9)
    assert found.download == pytest.approx(2 * model.num_params / 45e9, rel=0.05), "a tiny model's norms are padded"
    assert found.overlapped <= found.step <= found.serial


def test_units_at_home_neither_travel_nor_wait_for_the_cpu() -> None:
    model = Model.of(skeleton("llama"))
    home = replace(Plan(), on_device=tuple(range(len(model.units))))
    found = seconds(model, specs(), home, SHAPE, machine())
    assert (found.upload, found.download, found.optimizer, found.exposed) == (0, 0, 0, 0)


def test_an_optimizer_longer_than_its_window_is_exposed() -> None:
    model, fast = Model.of(skeleton("llama")), machine()
    slow = replace(fast, optimizer_s_per_param=replace(fast.optimizer_s_per_param, value=1.0))
    found = seconds(model, specs(), Plan(), SHAPE, slow)
    assert found.exposed >= found.optimizer - found.compute and found.limit == "optimizer"


def test_less_kept_is_never_faster_than_half_and_eager_never_faster_than_compiled() -> None:
    shares = [compute_share(Plan(compile=True, activation_budget=b)) for b in (0.0, 0.1, 0.3, 0.5, 0.7)]
    assert shares == sorted(shares)
    for budget in (0.0, 1.0):
        assert compute_share(Plan(activation_budget=budget)) < compute_share(Plan(compile=True, activation_budget=budget))
