"""Layers whose experts travel in parts against whole ones, and against fp64: chaos backend, slots, waves, places.

Where a token's experts lie in several parts, their sum has another order than in a whole layer, so results are compared with
fp64; for the same number of parts they are the same bits, whatever else the plan says.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerferry.backends.chaos import ChaosBackend
from layerferry.config import OptimConfig
from layerferry.engine import experts_in_parts
from layerferry.engine.anomaly import NonFinite, WatchfulTape
from layerferry.engine.batch import MicroBatch
from layerferry.engine.engine import Engine
from layerferry.errors import PlanError
from layerferry.layout import GRAD, WEIGHT
from layerferry.models.experts_in_parts import SomeExperts
from layerferry.models.template import Template
from layerferry.optim.choose import optimizer_for
from layerferry.plan import Plan
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import gradients, make_engine, micro_batches, real_model
from tests.engine.small import (
    check_parts_in_rounded_waves,
    check_parts_in_waves_and_on_arrival,
    clipped_steps,
    same,
    small_model,
)
from tests.engine.test_ends_in_parts import in_fp64, largest_error, one_step

BASE = Plan(fp32=True, num_slots=2, num_slabs=1, carry_fp32=True, expert_parts=3)
STEPS = 2

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "num_hidden_layers": 2},  # transposed tables, interleaved gates, biases
    "deepseek_v3": {"n_routed_experts": 8},  # a dense layer, shared experts, corrections in a buffer
    "nemotron_h": {"n_routed_experts": 8},  # no gate; layers of other kinds
}


def model_of(name: str, **changes: Any) -> Any:
    return real_model(tiny_config(BY_TYPE[name], **{**MODELS[name], **changes}))


def sparse(**changes: Any) -> Any:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    return small_model(model_type="qwen3_moe", **{"layers": 2, **sizes, **changes})


def exactly(model: Any, batches: Any) -> tuple[float, dict[str, Tensor]]:
    """By plain autograd in fp64, with the family's own loop over experts."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if getattr(module, "config", None) is not None:
            module.config._experts_implementation = "eager"
    return in_fp64(twin, batches)


# -------------------------------------------------------------------- against fp64 and against whole layers


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_to_fp64_as_those_of_whole_layers(name: str) -> None:
    """Both are fp32 sums of the same terms in another order: each may err four times as much as the other, and an expert that is
    dropped, doubled or taken for its neighbour would be off by its own size."""
    model, batches = model_of(name), micro_batches(3)
    loss, exact = exactly(model, batches)
    errors = {}
    for parts in (1, 3):
        report, found = one_step(model, replace(BASE, expert_parts=parts), batches)
        assert report.loss == pytest.approx(loss, rel=1e-5)
        errors[parts] = {name: largest_error(found[name], exact[name]) for name in exact}
    for entry, error in errors[3].items():
        assert error <= 4 * max(errors[1][entry], 2.0**-20), entry
        assert error < 1e-4, entry


def test_bf16_is_as_near_to_fp64_as_whole_layers_are() -> None:
    """A contribution is rounded to bf16 in either way; here their sum is rounded once. By norms over all parameters."""
    model, batches = sparse(dtype=torch.bfloat16), micro_batches(3)
    _, exact = exactly(model, batches)
    off = {}
    for parts in (1, 4):
        _, found = one_step(model, replace(BASE, fp32=False, expert_parts=parts), batches)
        off[parts] = sum(float((found[name].double() - exact[name]).square().sum()) for name in exact) ** 0.5
    assert 0 < off[4] < 1.5 * off[1]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"output_router_logits": True}),
        ("mixtral", {"attention_dropout": 0.3}),
        ("qwen3_moe", {"output_router_logits": True, "attention_dropout": 0.3, "mlp_only_layers": [1]}),
    ],
)
def test_what_routers_and_dropout_do_is_the_same(name: str, changes: dict[str, Any]) -> None:
    model = model_of(name, **changes)
    whole, expected = one_step(model, replace(BASE, expert_parts=1))
    report, found = one_step(model, BASE)
    assert report.loss == pytest.approx(whole.loss, rel=2.0**-20)
    for entry, value in expected.items():
        assert largest_error(found[entry], value.double()) < 2.0**-16, entry


FROZEN = {
    "routers": lambda name: ".gate." in name,
    "experts": lambda name: ".experts." in name,
    "bodies": lambda name: ".layers." in name and ".experts." not in name,
    "one table": lambda name: name.endswith("down_proj"),
    "everything below the last layer": lambda name: ".layers.1." not in name and "lm_head" not in name,
    "everything but the last experts": lambda name: ".layers.1.mlp.experts." not in name,
}


@pytest.mark.parametrize("what", FROZEN)
def test_frozen_parameters(what: str) -> None:
    model = sparse()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[what](name))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    whole, expected = one_step(model, replace(BASE, expert_parts=1, carry_fp32=True))
    report, found = one_step(model, BASE)
    assert report.loss == pytest.approx(whole.loss, rel=2.0**-20)
    assert trained and report.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    for name in trained:
        assert largest_error(found[name], expected[name].double()) < 2.0**-16, name


def test_all_runs_of_a_layer_need_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels choose their way by it, and what was asked by another way may be other bits."""
    model, seen = sparse(layers=3), {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.2." in name or ".layers.1.mlp.experts." in name)
    real = Template.__call__

    def call(self: Template, hidden: Tensor, *others: Any) -> Tensor:
        ways = seen.setdefault(self.module.self_attn.layer_idx, [])
        ways.append((torch.is_grad_enabled(), hidden.requires_grad))
        return real(self, hidden, *others)

    monkeypatch.setattr(Template, "__call__", call)
    one_step(model, BASE, micro_batches(1))
    assert seen == {0: 2 * [(False, False)], 1: 5 * [(True, False)], 2: 5 * [(True, True)]}


def test_experts_that_nobody_asks_have_no_gradient() -> None:
    """A router whose rows for half of the experts are far below all others': whole parts without a token."""
    model = sparse()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter[4:] = 0
                parameter[:4] = 10 * parameter[:4].abs()
            if "layernorm.weight" in name:
                parameter.abs_()
    batches = micro_batches(1, rows=1, tokens=3)
    _, found = one_step(model, replace(BASE, expert_parts=8), batches)
    _, expected = one_step(model, replace(BASE, expert_parts=1), batches)
    idle = [row for value in (found[n] for n in found if ".experts." in n) for row in value if not bool(row.any())]
    assert idle
    for name, value in expected.items():
        assert largest_error(found[name], value.double()) < 2.0**-16, name


# -------------------------------------------------------------------- one run, whatever the plan


def run(plan: Plan, *, chaos: int = 0, model: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    return clipped_steps(make_engine(model or sparse(), plan, backend=ChaosBackend(chaos)), STEPS)


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, Tensor]]:
    return run(BASE)


AT_HOST = {"host_inputs": 2, "row_tokens": 16, "rows_per_step": 8, "micro_batch_rows": 2}
CHANGES: list[dict[str, Any]] = [
    {"num_slots": 1},
    {"num_slots": 4, "num_slabs": 2},
    {"num_waves": 2},
    {"num_waves": 3, "first_wave": 2, "num_slots": 3},
    {"num_waves": 4, "resident_gradients": True},
    {"num_waves": 2, **AT_HOST},
    {"num_waves": 2, **AT_HOST, "host_inputs": 1, "num_slots": 1},
    {"activation_budget": 0.0},
    {"on_device": (0,), "num_waves": 2},
    {"on_disk": (1, 2)},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_slots_waves_and_places_change_nothing(changes: dict[str, Any], reference: Any) -> None:
    seen, left = run(replace(BASE, **changes), chaos=7)
    assert seen == reference[0] and same(left, reference[1])


def test_layers_at_home_are_whole() -> None:
    plan = replace(BASE, on_device=(1, 2))
    engine = make_engine(sparse(), plan)
    assert not engine._sweep.experts.parts
    engine.close()
    seen, left = run(plan)
    expected = run(replace(plan, expert_parts=1))
    assert seen == expected[0] and same(left, expected[1])


def test_bf16_is_as_invariant() -> None:
    plan = replace(BASE, fp32=False)
    expected = run(plan)
    for changed in ({"num_waves": 2}, {"num_slots": 4, "num_slabs": 2}):
        seen, left = run(replace(plan, **changed), chaos=1)
        assert seen == expected[0] and same(left, expected[1])


def test_updates_on_arrival_wait_for_all_parts() -> None:
    def left(plan: Plan) -> list[float]:
        engine = make_engine(sparse(), plan, backend=ChaosBackend(3))
        seen = []
        for step in range(STEPS):
            report = engine.step(micro_batches(3, seed=step), lr=1e-2, max_grad_norm=0.0)
            seen += [report.loss, report.grad_norm]
        seen.append(engine.evaluate(micro_batches(2, seed=9)).loss)
        engine.close()
        return seen

    plan = replace(BASE, carry_fp32=False)
    assert left(replace(plan, on_arrival=True)) == left(plan)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit", "muon", "adafactor"])
def test_optimizers_see_the_same_in_waves_and_on_arrival(optim: str) -> None:
    """``tests/gpu/test_engine_cuda.py`` has the same on a CUDA device."""

    def make(plan: Plan) -> Engine:
        optimizer = optimizer_for(OptimConfig(optim=optim), seed=0)
        return make_engine(sparse(dtype=torch.bfloat16), plan, backend=ChaosBackend(5), optimizer=optimizer)

    plan = replace(BASE, fp32=False, row_tokens=16, rows_per_step=6, micro_batch_rows=2)
    check_parts_in_waves_and_on_arrival(make, plan, lambda step: micro_batches(3, seed=step), host_inputs=1)


def test_sums_of_waves_in_bf16() -> None:
    model, plan = sparse(dtype=torch.bfloat16), replace(BASE, fp32=False, carry_fp32=False)
    check_parts_in_rounded_waves(lambda changed: make_engine(model, changed), plan, micro_batches(3))


def test_evaluation() -> None:
    found = {}
    for parts in (1, 3):
        engine = make_engine(sparse(), replace(BASE, expert_parts=parts))
        found[parts] = engine.evaluate(micro_batches(2)).loss
        engine.close()
    assert found[3] == pytest.approx(found[1], rel=2.0**-20)


def test_packed_samples_do_not_see_each_other() -> None:
    positions = torch.cat([torch.arange(7), torch.arange(9)]).expand(2, 16).contiguous()
    batches = [replace(batch, position_ids=positions, isolated=True) for batch in micro_batches(2, padded=False)]
    assert all(isinstance(batch, MicroBatch) for batch in batches)
    whole, expected = one_step(sparse(), replace(BASE, expert_parts=1), batches)
    report, found = one_step(sparse(), BASE, batches)
    assert report.loss == pytest.approx(whole.loss, rel=2.0**-20)
    assert all(largest_error(found[name], value.double()) < 2.0**-16 for name, value in expected.items())


def test_detect_anomaly_changes_nothing() -> None:
    looked = make_engine(sparse(), BASE, backend=ChaosBackend(2))
    looked.tape_type = WatchfulTape
    seen, left = clipped_steps(looked, STEPS)
    expected = run(BASE)
    assert seen == expected[0] and same(left, expected[1])


def test_detect_anomaly_names_table_and_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is finite; of the gradients of one part's tables the last is not."""
    engine = make_engine(sparse(), BASE)
    engine.tape_type = WatchfulTape
    (table, part) = (engine.skeleton.layer_units[1].names["mlp.experts.down_proj"], engine._sweep.experts.parts[1][1])
    real = experts_in_parts._pull_one

    def pull_one(experts: SomeExperts, *others: Any) -> Any:
        found = real(experts, *others)
        return [*found[:-1], found[-1] * float("inf")] if experts.experts == next(iter(part.rows.values())) else found

    monkeypatch.setattr(experts_in_parts, "_pull_one", pull_one)
    with pytest.raises(NonFinite, match=rf"^the gradient of {table} is not finite: .*, micro-batch 0 of {part.name}$"):
        engine.step(micro_batches(2), lr=0.0)
    engine.close()


# -------------------------------------------------------------------- what travels, and what is refused


def test_what_travels_in_a_wave() -> None:
    """Of P parts in two slots: each on the way up; twice on the way down, but the two at the turn. Bodies twice, but that of the
    last layer; gradients once."""
    engine = make_engine(sparse(), replace(BASE, num_slots=1, expert_parts=4))
    engine.step(micro_batches(2), lr=0.0)
    engine.settle()
    specs, experts = engine.store.specs, engine._sweep.experts
    ends = sum(unit.layout.bytes(specs[WEIGHT]) for unit in engine.store.units if not unit.is_layer)
    (part,) = {part.layout.bytes(specs[WEIGHT]) for parts in experts.parts.values() for part in parts}
    (body,) = {body.layout.bytes(specs[WEIGHT]) for body in experts.bodies.values()}
    assert engine.feed.uploaded_bytes == ends + 3 * body + 2 * (4 + 8 - 2) * part
    assert engine.drain.drained_bytes == sum(unit.layout.bytes(specs[GRAD]) for unit in engine.store.units)
    engine.close()


def test_norm_and_gradient_are_those_of_the_bytes_at_home() -> None:
    engine = make_engine(sparse(dtype=torch.bfloat16), replace(BASE, fp32=False, carry_fp32=False))
    report = engine.step(micro_batches(3), lr=0.0)
    everything = torch.cat([value.flatten() for value in gradients(engine).values()]).double()
    assert report.grad_norm == pytest.approx(float(everything.norm()), rel=1e-5)
    engine.close()


@pytest.mark.parametrize("name", ["llama", "jetmoe", "llama4_text"])
def test_layers_without_stacked_experts_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"expert_parts: 3: \w+: its layers have no stacked experts: expert_parts: 1 feeds"):
        make_engine(real_model(tiny_config(BY_TYPE[name])), BASE)


@pytest.mark.parametrize("pin", ["mlp_chunk_tokens", "turn_layers", "richer_layers"])
def test_what_needs_whole_layers_is_refused(pin: str) -> None:
    with pytest.raises(PlanError, match=rf"{pin}: 1: with expert_parts every layer is computed again"):
        make_engine(sparse(), replace(BASE, **{pin: 1}, num_slots=3))
