"""Kept inputs @host: the same bits as kept @device, whatever else the plan says, and memory is given back in time."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerferry.backends.base import Lane
from layerferry.backends.chaos import ChaosBackend
from layerferry.backends.cpu import CpuBackend
from layerferry.engine.anomaly import WatchfulTape
from layerferry.engine.clock import Clock
from layerferry.engine.kept import KeptInputs
from layerferry.engine.oracle import WholeRows, loss_and_gradients
from layerferry.engine.sizes import LANDINGS, InputSizes, input_sizes
from layerferry.errors import PlanError
from layerferry.layout import WEIGHT_PLANE, Plane
from layerferry.models.embedding import EmbeddingTap
from layerferry.models.graph import tensors_in
from layerferry.models.inputs import Inputs
from layerferry.plan import Plan
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import gradients, make_engine, micro_batches, real_model, seeded, unequal
from tests.engine.small import clipped_steps, same, small_model

BASE = Plan(fp32=True, num_slots=2, num_slabs=1, carry_fp32=True, micro_batch_rows=2, row_tokens=16, rows_per_step=8)
STEPS = 2


def run(plan: Plan, *, chaos: int | None = None, model: Any = None, tape: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    """Clipped steps of four micro-batches at changing rates; losses, norms, and the state that is left."""
    engine = make_engine(model or small_model(), plan, backend=CpuBackend() if chaos is None else ChaosBackend(chaos))
    engine.tape_type = tape or engine.tape_type
    return clipped_steps(engine, STEPS)


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, Tensor]]:
    return run(BASE)


GRID = list(itertools.product((1, 2, 3), (1, 2, 4), (1.0, 0.0), ((), (1,), (0, 1, 2, 3, 4))))


@pytest.mark.parametrize(("host_inputs", "num_waves", "budget", "home"), GRID)
def test_inputs_at_the_host_change_no_bit(
    host_inputs: int, num_waves: int, budget: float, home: tuple[int, ...], reference: Any
) -> None:
    plan = replace(BASE, host_inputs=host_inputs, num_waves=num_waves, activation_budget=budget, num_slots=1 + num_waves)
    seen, left = run(replace(plan, on_device=home), chaos=host_inputs + 10 * num_waves)
    assert seen == reference[0] and same(left, reference[1])


@pytest.mark.parametrize("host_inputs", [2, 3])
def test_nor_in_bf16(host_inputs: int) -> None:
    plan = replace(BASE, fp32=False)
    seen, left = run(replace(plan, host_inputs=host_inputs), chaos=1)
    expected = run(plan)
    assert seen == expected[0] and same(left, expected[1])


def test_nor_with_tied_weights_or_a_watchful_tape(reference: Any) -> None:
    tied = [run(replace(BASE, host_inputs=n), chaos=n, model=small_model(tie_word_embeddings=True)) for n in (0, 3)]
    assert tied[0][0] == tied[1][0] and same(tied[0][1], tied[1][1])
    seen, left = run(replace(BASE, host_inputs=2), tape=WatchfulTape)
    assert seen == reference[0] and same(left, reference[1])


@pytest.mark.parametrize("model_type", ["gpt2", "gemma4_text", "gemma3_text", "bloom", "ctrl", "mamba", "qwen3_moe"])
@pytest.mark.parametrize("host_inputs", [1, 2])
def test_families_are_plain_autograd_to_the_last_bit(model_type: str, host_inputs: int) -> None:
    """Dropout (gpt2), gradients of side inputs (gemma4), several kinds of layers, prologues with maths of their own, an fp32
    residual stream (mamba), experts."""
    model = real_model(tiny_config(BY_TYPE[model_type]))
    plan = replace(BASE, host_inputs=host_inputs, rows_per_step=4)
    with seeded(model):
        loss, expected = loss_and_gradients(model, micro_batches())
    engine = make_engine(model, plan, other_slots=True)
    assert engine.step(micro_batches(), WholeRows(), lr=0.0).loss == loss.item()
    assert not unequal(gradients(engine), expected)
    engine.close()


def test_dropout_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not vacuous: without the second seed the gradients are others."""
    model = real_model(tiny_config(BY_TYPE["gpt2"], resid_pdrop=0.5))
    found = []
    seed, calls = ChaosBackend.seed, itertools.count()
    forward = 2 * (1 + 2 + 1)  # prologue, layers, head: both micro-batches
    for forgets in (False, True):
        engine = make_engine(model, replace(BASE, host_inputs=2, rows_per_step=4))
        if forgets:
            monkeypatch.setattr(ChaosBackend, "seed", lambda own, value: seed(own, value if next(calls) < forward else 0))
        engine.step(micro_batches(), lr=0.0)
        found.append(gradients(engine))
        engine.close()
    assert unequal(*found)


def test_router_logits_reach_the_load_balancing_loss() -> None:
    model = real_model(tiny_config(BY_TYPE["mixtral"], output_router_logits=True, router_aux_loss_coef=0.5))
    found = []
    for host_inputs in (0, 1, 2):
        engine = make_engine(model, replace(BASE, host_inputs=host_inputs))
        report = engine.step(micro_batches(4, padded=False), lr=0.0)
        found.append((report.loss, gradients(engine)))
        engine.close()
    for loss, grads in found[1:]:
        assert loss == found[0][0] and not unequal(grads, found[0][1])


def test_rotary_tables_are_one_for_all_layers() -> None:
    """What the layers share is kept once a micro-batch, not once a layer: views of the same storage."""
    engine = make_engine(small_model(layers=4), BASE)
    unit = engine.skeleton.prologue_unit
    with engine.feed(unit) as slot:
        engine.skeleton.bind(unit, Plane(unit.layout, WEIGHT_PLANE, slot.buffer))
        _, calls = engine.skeleton.prologue(Inputs(micro_batches(1)[0].input_ids), EmbeddingTap(()))
    tables = [{t.untyped_storage().data_ptr() for t in tensors_in((call.args, call.kwargs)) if t.dim() == 3} for call in calls]
    assert len(tables) == 4 and len(tables[0]) == 2 and all(own == tables[0] for own in tables)
    engine.close()


# -------------------------------------------------------------------- bytes


def test_sizes_are_those_of_full_micro_batches_of_a_wave() -> None:
    sizes = input_sizes(replace(BASE, row_tokens=13, rows_per_step=7, num_waves=2, host_inputs=3), 10, 4)
    assert (sizes.num_layers, sizes.num_micro_batches, sizes.input_bytes) == (3, 2, 2 * 16 * 10)
    assert sizes.host_bytes == 3 * 2 * 320 and sizes.device_bytes == LANDINGS * 320
    assert input_sizes(BASE, 10, 4).device_bytes == 0


def test_a_plan_without_rows_and_a_step_beyond_it_are_refused() -> None:
    with pytest.raises(PlanError, match="row_tokens"):
        make_engine(small_model(), replace(BASE, row_tokens=0, host_inputs=1))
    engine = make_engine(small_model(), replace(BASE, rows_per_step=4, host_inputs=1))
    with pytest.raises(PlanError, match=r"4 micro-batches.* of 2: .*host_inputs=0"):
        engine.step(micro_batches(4), lr=0.0)
    assert not engine.step(micro_batches(2), lr=0.0).skipped
    engine.close()


def kept(backend: Any, *, layers: int = 2, micro: int = 2, size: int = 32) -> KeptInputs:
    return KeptInputs(backend, Clock(backend), InputSizes(layers, micro, size, 0, layers, layers))


class FakeUnit:
    name = "layer.0"


UNIT: Any = FakeUnit()


def test_an_input_wider_than_planned_stays_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    own = kept(ChaosBackend(), size=4)
    own.begin([0, 1])
    wide, narrow = torch.randn(1, 2, 4), torch.randn(1, 1, 1)
    with caplog.at_level(logging.WARNING):
        for layer in range(2):
            own.send(UNIT, layer, 0, wide)
            own.send(UNIT, layer, 1, narrow.clone())
    assert [r.getMessage() for r in caplog.records] == [
        "layer.0: its input takes 4 bytes a value, more than planned, and stays @device"
    ]
    own.expect()
    for layer in (1, 0):
        with own.bring_back(layer, 0) as hidden:
            assert hidden is wide
        with own.bring_back(layer, 1) as hidden:
            assert torch.equal(hidden, narrow)


def test_what_was_sent_is_released_once_it_has_arrived_and_not_before() -> None:
    backend = ChaosBackend(eagerness=0.0)
    own = kept(backend, layers=3, micro=1)
    own.begin([5])
    inputs = [torch.randn(1, 2, 4) for _ in range(3)]
    values = [tensor.clone() for tensor in inputs]
    for layer, tensor in enumerate(inputs):
        own.send(UNIT, layer, 5, tensor)
    assert torch.equal(inputs[1], values[1]) and torch.equal(inputs[2], values[2])
    own.expect()
    assert bool(torch.isnan(inputs[1]).all()) and bool(torch.isnan(inputs[2]).all())
    assert torch.equal(inputs[0], values[0]), "the first layer's may be part of the prologue's graph"
    for layer in (2, 1, 0):
        with own.bring_back(layer, 5) as hidden:
            assert torch.equal(hidden, values[layer])
        assert bool(torch.isnan(hidden).all()), "a landing is released"
    assert own.sent_bytes == own.returned_bytes == 3 * 32


@pytest.mark.parametrize("chaos", range(4))
def test_what_is_taken_stays_when_its_landing_is_used_again(chaos: int) -> None:
    """Three layers at the host, more than there are landings, and a fourth whose inputs stay: of those no copy is made."""
    backend = ChaosBackend(chaos)
    own = KeptInputs(backend, Clock(backend), InputSizes(3, 2, 32, 0, 4, 4))
    own.begin([4, 7])
    places = [(layer, number) for layer in range(4) for number in (4, 7)]
    sent = {place: torch.randn(1, 2, 4) for place in places}
    values = {place: tensor.clone() for place, tensor in sent.items()}
    for (layer, number), tensor in sent.items():
        own.send(UNIT, layer, number, tensor)
    own.expect()
    taken = {(layer, number): own.take(layer, number) for layer in (3, 2, 1, 0) for number in (4, 7)}
    assert all(torch.equal(taken[place], values[place]) for place in places)
    assert all(taken[3, number] is sent[3, number] for number in (4, 7))
    assert own.returned_bytes == 6 * 32


def test_a_wave_that_broke_off_leaves_nothing_behind() -> None:
    own = kept(ChaosBackend(3))
    for attempt in range(3):
        own.begin([0, 1])
        for layer in range(2):
            for number in range(2):
                own.send(UNIT, layer, number, torch.full((1, 2, 4), float(attempt)))
        if attempt != 1:
            own.expect()
            with own.bring_back(1, 0) as hidden:
                assert bool((hidden == attempt).all())


def test_spans_and_waits_are_the_clocks() -> None:
    engine = make_engine(small_model(), replace(BASE, host_inputs=3), backend=CpuBackend())
    engine.step(micro_batches(4), lr=0.0)
    engine.clock.start_recording()
    before = engine.moved_bytes
    engine.step(micro_batches(4), lr=0.0)
    spans = engine.clock.stop_recording()
    inputs = [(span.lane, span.name) for span in spans if span.name.endswith("input")]
    assert inputs.count((Lane.DOWNLOAD, "layer.1 input")) == inputs.count((Lane.UPLOAD, "layer.1 input")) == 4
    assert len(inputs) == 2 * 3 * 4
    assert engine.moved_bytes - before >= 2 * 3 * 4 * 2 * 16 * 16 * 4
    engine.close()
