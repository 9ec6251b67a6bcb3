"""Frozen parameters: the engine is plain autograd with ``requires_grad`` off, to the last bit, and holds and moves no more than
it must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerferry.backends.chaos import ChaosBackend
from layerferry.engine.engine import Engine, clip_coefficient
from layerferry.engine.oracle import WholeRows, loss_and_gradients
from layerferry.layout import FP32_PLANE, GRAD, RESIDUE, WEIGHT
from layerferry.optim.reference import ReferenceKernels
from layerferry.optim.rules import AdamWScalars
from layerferry.plan import Plan
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import PLAN, gradients, make_engine, masters, micro_batches, real_model, seeded, unequal
from tests.engine.small import same, small_model, state

BF16 = replace(PLAN, fp32=False)
LAYERS = 4


def only(*parts: str) -> Callable[[str], bool]:
    return lambda name: any(part in name for part in parts)


WAYS: dict[str, Callable[[str], bool]] = {
    "the last layer": only("layers.3."),
    "the last two": only("layers.2.", "layers.3."),
    "the first": only("layers.0."),
    "one in the middle": only("layers.1."),
    "every other one": only("layers.1.", "layers.3."),
    "mlp of the last two": only("layers.2.mlp", "layers.3.mlp"),
    "attention of one, mlp of another": only("layers.1.self_attn", "layers.3.mlp"),
    "norms": only("norm"),
    "the head": only("lm_head"),
    "the final norm": only("model.norm"),
    "the embedding": only("embed_tokens"),
    "the embedding and the last layer": only("embed_tokens", "layers.3."),
    "the last layer and the head": only("layers.3.", "lm_head"),
}
TIED_WAYS = ("the last two", "norms", "the final norm", "the embedding", "the embedding and the last layer")


def frozen_model(trained: Callable[[str], bool], **options: Any) -> Any:
    model = small_model(layers=LAYERS, **options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    assert any(parameter.requires_grad for parameter in model.parameters())
    return model


def step_equals_autograd(model: Any, plan: Plan, *, batches: Any = None) -> Engine:
    """One unclipped step beside the oracle: loss and every gradient."""
    batches = batches or micro_batches(3)
    with seeded(model):
        loss, expected = loss_and_gradients(model, batches)
    engine = make_engine(model, plan, other_slots=not plan.on_device)
    report = engine.step(batches, WholeRows(), lr=0.0, max_grad_norm=0.0)
    found = gradients(engine)
    assert report.loss == float(loss)
    assert not unequal(found, expected)
    assert any(value.any() for value in expected.values())
    return engine


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_autograds(way: str, budget: float) -> None:
    step_equals_autograd(frozen_model(WAYS[way]), replace(PLAN, activation_budget=budget)).close()


@pytest.mark.parametrize("way", TIED_WAYS)
def test_a_tied_table_is_frozen_or_trained_as_a_whole(way: str) -> None:
    model = frozen_model(WAYS[way], tie_word_embeddings=True)
    engine = step_equals_autograd(model, PLAN)
    assert engine.skeleton.reach.trains_prologue == ("embedding" in way)
    engine.close()


INPUTS = {"row_tokens": 16, "micro_batch_rows": 2, "rows_per_step": 6}
PLANS = [
    {"num_waves": 3},
    {"num_waves": 3, "resident_gradients": True},
    {"on_device": (0, 1, 4)},
    *({"host_inputs": count, **INPUTS} for count in (1, 3, 4)),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("way", ["the last two", "every other one", "the embedding", "mlp of the last two"])
def test_with_waves_and_units_at_home_too(way: str, plan: dict[str, Any]) -> None:
    step_equals_autograd(frozen_model(WAYS[way]), replace(PLAN, carry_fp32=True, **plan)).close()


@pytest.mark.parametrize("num_waves", [1, 3])
@pytest.mark.parametrize(
    "way", ["the last two", "norms", "the final norm", "the head", "the embedding", "the last layer and the head"]
)
def test_ends_in_parts_too(way: str, num_waves: int) -> None:
    """Freezing changes no gradient that is still computed: those of the same plan with everything trained are the oracle."""
    plan, found = replace(PLAN, end_parts=3, num_waves=num_waves, carry_fp32=True), []
    for trained in (WAYS[way], only("")):
        engine = make_engine(frozen_model(trained, vocab_size=2048), plan)
        engine.step(micro_batches(3), lr=0.0, max_grad_norm=0.0)
        assert engine._head_parts is not None
        found.append({name: value for name, value in gradients(engine).items() if WAYS[way](name)})
        engine.close()
    assert found[0] and not unequal(*found)


@pytest.mark.parametrize("way", ["every other one", "mlp of the last two", "norms"])
def test_bf16_gradients_are_the_rounded_sums(way: str) -> None:
    model = frozen_model(WAYS[way], dtype=torch.bfloat16)
    batches = micro_batches(2)
    with seeded(model):
        loss, expected = loss_and_gradients(model, batches)
    engine = make_engine(model, BF16, other_slots=True)
    report = engine.step(batches, WholeRows(), lr=0.0, max_grad_norm=0.0)
    assert report.loss == float(loss)
    assert not unequal(gradients(engine), {name: value.bfloat16().float() for name, value in expected.items()})
    engine.close()


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("way", ["the last two", "every other one", "mlp of the last two", "attention of one, mlp of another"])
def test_the_load_balancing_loss_counts_routers_of_frozen_layers(way: str, model_type: str) -> None:
    model = frozen_model(WAYS[way], model_type=model_type, output_router_logits=True)
    engine = step_equals_autograd(model, PLAN, batches=micro_batches(2, padded=False))
    assert engine.skeleton.balance is not None
    engine.close()


def test_a_router_alone() -> None:
    model = frozen_model(only("layers.2.mlp.gate."), model_type="mixtral", output_router_logits=True)
    step_equals_autograd(model, PLAN, batches=micro_batches(2, padded=False)).close()


def test_experts_alone_train_nothing_that_the_router_logits_depend_on() -> None:
    model = frozen_model(only("layers.2.mlp.experts"), model_type="mixtral", output_router_logits=True)
    step_equals_autograd(model, PLAN, batches=micro_batches(2, padded=False)).close()


def test_dropout_of_layers_without_backward_draws_the_same_numbers() -> None:
    model = frozen_model(only("h.3."), model_type="gpt2", n_layer=LAYERS, resid_pdrop=0.3, embd_pdrop=0.2, attn_pdrop=0.0)
    step_equals_autograd(model, PLAN).close()


def test_side_inputs_of_a_trained_prologue() -> None:
    """gemma4 hands every layer an input of its own, made by the prologue: training what makes it takes the backward down."""
    model = real_model(tiny_config(BY_TYPE["gemma4_text"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("per_layer_model_projection" in name or ".layers.1." in name)
    engine = step_equals_autograd(model, PLAN)
    assert engine.skeleton.reach.trains_prologue and engine.skeleton.reach.num_below == 0
    engine.close()


# -------------------------------------------------------------------- steps


LIMIT = 0.02


def plain_steps(model: Any, steps: int, *, limit: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, clip coefficients and parameters after ``steps`` of plain autograd and reference AdamW over what is trained."""
    kernels = ReferenceKernels()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    moments = {name: (torch.zeros(p.numel()), torch.zeros(p.numel())) for name, p in trained.items()}
    losses, norms = [], []
    for step in range(steps):
        loss, found = loss_and_gradients(model, micro_batches(2, seed=step))
        norms.append(float(torch.linalg.vector_norm(torch.cat([found[name].flatten().double() for name in trained]))))
        scale = clip_coefficient(norms[-1], limit)
        assert scale < 1.0
        losses.append(float(loss))
        scalars = AdamWScalars.of(lr=1e-2, step=step + 1, grad_scale=scale, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        for name, parameter in trained.items():
            kernels.adamw_fp32(parameter.detach().view(-1), found[name].view(-1), *moments[name], scalars=scalars, threads=1)
    return losses, norms, dict(model.named_parameters())


@pytest.mark.parametrize("way", ["the last two", "every other one", "mlp of the last two", "the embedding and the last layer"])
def test_steps_move_what_is_trained_and_nothing_else(way: str) -> None:
    """The norm is that of the trained parameters alone. Its sum is taken in another order here (fp64): 2^-22 of it, and an
    update moves by no more than that share."""
    engine = make_engine(frozen_model(WAYS[way]), PLAN)
    before = {name: value.clone() for name, value in masters(engine).items()}
    reports = [engine.step(micro_batches(2, seed=s), WholeRows(), lr=1e-2, max_grad_norm=LIMIT) for s in range(3)]
    after = masters(engine)
    losses, norms, expected = plain_steps(frozen_model(WAYS[way]), 3, limit=LIMIT)
    assert [r.loss for r in reports] == pytest.approx(losses, rel=1e-6) and reports[0].loss == losses[0]
    assert [r.grad_norm for r in reports] == pytest.approx(norms, rel=1e-5)
    for name, value in after.items():
        if WAYS[way](name):
            assert not torch.equal(value, before[name]) and torch.allclose(value, expected[name], rtol=0, atol=1e-6)
        else:
            assert torch.equal(value, before[name])
    engine.close()


RUNS = [
    {"num_slots": 3},
    {"num_slots": 5, "num_slabs": 2},
    {"num_waves": 2},
    {"num_waves": 2, "resident_gradients": True},
    {"activation_budget": 0.0},
    {"host_inputs": 3, "num_waves": 2, **INPUTS, "rows_per_step": 8},
    {"on_device": (1, 2)},
    {"on_device": (0, 1, 2, 3, 4, 5)},
    {"optimizer_threads": 2},
]


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("way", ["the last two", "every other one", "mlp of the last two"])
def test_the_plan_does_not_change_a_bit(way: str, fp32: bool) -> None:
    base = replace(PLAN, fp32=fp32, carry_fp32=True)
    expected = _run(way, base)
    for number, changed in enumerate(RUNS):
        if not fp32 and "on_device" in changed:
            continue  # a gradient @host is rounded to bf16 where it is not carried in fp32
        seen, left = _run(way, replace(base, **changed), chaos=number)
        assert seen == expected[0] and same(left, expected[1]), changed


def _run(way: str, plan: Plan, *, chaos: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    engine = make_engine(frozen_model(WAYS[way]), plan, backend=ChaosBackend(chaos))
    seen = []
    for step in range(3):
        report = engine.step(micro_batches(4, seed=step), lr=1e-2, max_grad_norm=0.5)
        seen += [report.loss, report.grad_norm]
    left = state(engine)
    engine.close()
    return seen, left


def test_evaluation_is_that_of_the_whole_model() -> None:
    model = frozen_model(WAYS["the last two"])
    engine = make_engine(model, PLAN)
    batches = micro_batches(3)
    loss, _ = loss_and_gradients(model, batches)
    assert engine.evaluate(batches, WholeRows()).loss == pytest.approx(float(loss), rel=1e-6)
    engine.close()


# -------------------------------------------------------------------- bytes and moves


def test_a_frozen_unit_is_its_weights() -> None:
    engine = make_engine(frozen_model(WAYS["the last layer"], dtype=torch.bfloat16), BF16)
    for unit in engine.store.units:
        planes = engine.store.planes(unit)
        held = sum(plane.buffer.numel() for plane in planes.values())
        per_param = 14 if unit.name == "layer.3" else 2
        assert held == per_param * unit.layout.section_numel[0] and not unit.layout.section_numel[1]
        assert (unit.num_trained > 0) == (unit.name == "layer.3")
    assert engine.num_trained == engine.store.units[4].numel
    engine.close()


def test_a_mixed_unit_has_state_for_its_trained_part_alone() -> None:
    engine = make_engine(frozen_model(WAYS["mlp of the last two"], dtype=torch.bfloat16), BF16)
    unit = engine.store.units[4]
    whole, trained = unit.layout.section_numel[0], unit.layout.trained_numel[0]
    assert 0 < trained < whole and [span.stop for span in unit.layout.spans][-1] == trained
    planes = engine.store.planes(unit)
    assert planes[WEIGHT].buffer.numel() == 2 * whole
    assert planes[GRAD].buffer.numel() == planes[RESIDUE].buffer.numel() == 2 * trained
    assert unit.layout.bytes(FP32_PLANE) == 4 * trained
    engine.close()


def test_layers_below_the_lowest_trained_one_are_fed_once_and_leave_nothing() -> None:
    engine = make_engine(frozen_model(WAYS["the last layer"]), replace(PLAN, num_slots=1))
    kept: list[str] = []
    forward = engine.tape_type.forward

    class Noting(engine.tape_type):  # type: ignore[name-defined,misc]
        def forward(self, unit: Any, *args: Any) -> Tensor:
            kept.append(unit.name)
            found = forward(self, unit, *args)
            assert not any(graph.hidden.requires_grad for graph in self._graphs.values())
            return found

    engine.tape_type = Noting
    engine.step(micro_batches(1), lr=1e-2)
    before, drained = engine.feed.uploaded_bytes, engine.drain.drained_bytes
    engine.step(micro_batches(1), lr=1e-2)
    weights = [engine.store.plane(unit, WEIGHT).buffer.numel() for unit in engine.store.units]
    assert kept == ["layer.3", "layer.3"]
    assert engine.feed.uploaded_bytes - before == sum(weights), "the turn finds the last layer where it is"
    assert engine.drain.drained_bytes - drained == engine.store.plane(engine.store.units[4], GRAD).buffer.numel()
    engine.close()


def test_frozen_parameters_keep_the_bytes_they_came_with() -> None:
    """Also where they came in fp32: the weight is what the device computes with."""
    model = frozen_model(WAYS["the last layer"])
    engine = make_engine(model, BF16)
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    engine.step(micro_batches(1), lr=1e-2)
    found = masters(engine)
    assert all(torch.equal(found[name], value.detach().bfloat16().float()) for name, value in frozen.items())
    engine.close()
