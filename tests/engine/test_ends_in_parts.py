"""Embedding and head in parts against whole ones, and against fp64: chaos backend, every number of parts, slots, slabs, waves.

Look-ups move numbers and add them in the same order, so the embedding's gradient is the same to the last bit wherever the head
gives it the same. The head's sums have another order: log-sum-exp and dL/dx add up block by block. Its bound is that of the
fused head (``tests/objectives/test_fused_linear.py``), and holds against fp64 of the whole model.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layerferry.backends.chaos import ChaosBackend
from layerferry.errors import PlanError
from layerferry.objectives import OnHidden, OnLogits
from layerferry.objectives.head import Targets
from layerferry.plan import Plan
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import gradients, make_engine, masked, micro_batches, real_model, unequal
from tests.engine.small import same, small_model, state

BASE = Plan(fp32=True, num_slots=2, num_slabs=1, carry_fp32=True, end_parts=3)
UNIT = 2.0**-24

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "scaled embedding, soft-capped, untied": ("gemma2", {"tie_word_embeddings": False, "final_logit_softcapping": 2.0}),
    "scaled logits, untied": ("cohere", {"tie_word_embeddings": False, "logit_scale": 0.25}),
    "positions beside": ("gpt2", {"tie_word_embeddings": False}),
    "a norm behind the embedding": ("bloom", {"tie_word_embeddings": False}),
    "biased": ("phi", {"vocab_size": 384}),
    "divided": ("granite", {"logits_scaling": 4.0}),
    "experts": ("mixtral", {"output_router_logits": True}),
}


def model_of(name: str, **changes: Any) -> Any:
    model_type, own = MODELS[name]
    return real_model(tiny_config(BY_TYPE[model_type], **{"num_hidden_layers": 2, **own, **changes}))


def one_step(model: Any, plan: Plan, batches: Any = None, objective: Any = None) -> tuple[Any, dict[str, Tensor]]:
    engine = make_engine(model, plan)
    report = engine.step(batches or micro_batches(3), objective, lr=0.0)
    found = gradients(engine)
    engine.close()
    return report, found


def in_fp64(model: Any, batches: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the mean cross entropy by plain autograd."""
    double = copy.deepcopy(model).double()
    double.config.output_router_logits = False
    total = sum(batch.num_targets for batch in batches)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        logits = double(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)
        targets = Targets.of(batch, torch.device("cpu"))
        loss = loss + F.cross_entropy(logits[targets.rows], targets.labels, reduction="sum") / total
    loss.backward()  # type: ignore[no-untyped-call]
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in double.named_parameters()}
    return loss.item(), found


def largest_error(found: Tensor, exact: Tensor) -> float:
    """The largest error, as a share of the largest value."""
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-9))


# -------------------------------------------------------------------- against fp64 and against whole ends


@pytest.mark.parametrize("name", [name for name in MODELS if name != "experts"])
def test_loss_and_gradients_are_as_near_to_fp64_as_those_of_whole_ends(name: str) -> None:
    """Both are fp32 sums of the same terms in another order: each may err four times as much as the other, and a row that is
    dropped, doubled or taken from its neighbour would be off by its own size."""
    model, batches = model_of(name), micro_batches(3)
    loss, exact = in_fp64(model, batches)
    errors = {}
    for parts in (1, 3):
        report, found = one_step(model, replace(BASE, end_parts=parts), batches)
        assert abs(report.loss - loss) <= 4 * 96 * UNIT * loss
        errors[parts] = {
            n: float((found[n].double() - exact[n]).abs().max() / exact[n].abs().max().clamp(min=1e-9)) for n in exact
        }
    for entry, error in errors[3].items():
        assert error <= 4 * max(errors[1][entry], 2.0**-20), entry
        assert error < 1e-4, entry


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("plain", {}),
        ("scaled embedding, soft-capped, untied", {}),
        ("positions beside", {"embd_pdrop": 0.2}),
        ("a norm behind the embedding", {"hidden_dropout": 0.2}),
    ],
)
@pytest.mark.parametrize("waves", [1, 3])
def test_an_embedding_in_parts_changes_no_bit(name: str, changes: dict[str, Any], waves: int) -> None:
    """With the head at home, and so whole, nothing of the step has another order but the sum of the norm's squares."""
    model = model_of(name, **changes)
    head = 3  # embedding, two layers, head
    plan = replace(BASE, on_device=(head,), num_waves=waves)
    whole, expected = one_step(model, replace(plan, end_parts=1))
    report, found = one_step(model, plan)
    assert report.loss == whole.loss and not unequal(found, expected)
    assert report.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_in_parts(name: str) -> None:
    engine = make_engine(model_of(name), BASE)
    sweep = engine._sweep
    ends = [end for end in (sweep.embedding_parts, sweep.head_parts) if end is not None]
    assert [len(end.parts) for end in ends] == [3, 3]
    engine.close()


def test_the_routers_loss_is_added_too() -> None:
    model = model_of("experts")
    found = {parts: one_step(model, replace(BASE, end_parts=parts)) for parts in (1, 3)}
    assert found[3][0].loss == pytest.approx(found[1][0].loss, rel=64 * UNIT)
    for entry, expected in found[1][1].items():
        assert torch.allclose(found[3][1][entry], expected, rtol=0, atol=2.0**-16 * float(expected.abs().max())), entry


# -------------------------------------------------------------------- one run, whatever the plan

STEPS = 2


def run(plan: Plan, *, chaos: int = 0, model: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    engine = make_engine(model or small_model(), plan, backend=ChaosBackend(chaos))
    seen = []
    for step in range(STEPS):
        report = engine.step(micro_batches(4, seed=step), lr=1e-2 / (1 + step), max_grad_norm=0.5)
        seen += [report.loss, report.grad_norm, engine.evaluate(micro_batches(2, seed=9)).loss]
    left = state(engine)
    engine.close()
    return seen, left


@pytest.fixture(scope="module")
def references() -> dict[int, tuple[list[float], dict[str, Tensor]]]:
    return {parts: run(replace(BASE, end_parts=parts)) for parts in (2, 3, 12)}


GRID = list(itertools.product((2, 3, 12), (1, 3, 5), (1, 2, 4), (False, True)))


@pytest.mark.parametrize(("parts", "slots", "waves", "resident"), GRID)
def test_slots_waves_and_places_of_sums_change_nothing(
    parts: int, slots: int, waves: int, resident: bool, references: Any
) -> None:
    budget = 0.0 if slots == 3 else 1.0
    plan = replace(BASE, end_parts=parts, num_slots=slots, num_slabs=1 + waves % 2, num_waves=waves, activation_budget=budget)
    seen, left = run(replace(plan, resident_gradients=resident), chaos=slots + 10 * waves)
    assert seen == references[parts][0] and same(left, references[parts][1])


@pytest.mark.parametrize("on_device", [(1,), (1, 2, 3)])
def test_layers_at_home_change_nothing(on_device: tuple[int, ...], references: Any) -> None:
    seen, left = run(replace(BASE, on_device=on_device, num_waves=2), chaos=5)
    assert seen == references[3][0] and same(left, references[3][1])


def test_ends_at_home_are_whole() -> None:
    everything = replace(BASE, on_device=(0, 4), num_waves=2)
    seen, left = run(everything)
    expected = run(replace(everything, end_parts=1))
    assert seen == expected[0] and same(left, expected[1])


def test_bf16_is_as_invariant() -> None:
    plan = replace(BASE, fp32=False)
    expected = run(plan)
    for changed in ({"num_waves": 2}, {"num_slots": 5, "num_slabs": 2}, {"activation_budget": 0.0}):
        seen, left = run(replace(plan, **changed), chaos=1)
        assert seen == expected[0] and same(left, expected[1])


def test_a_gradient_in_parts_is_rounded_once_and_its_norm_is_that_of_its_bytes() -> None:
    engine = make_engine(small_model(dtype=torch.bfloat16), replace(BASE, fp32=False, carry_fp32=False))
    report = engine.step(micro_batches(3), lr=0.0)
    everything = torch.cat([value.flatten() for value in gradients(engine).values()]).double()
    assert report.grad_norm == pytest.approx(float(everything.norm()), rel=1e-5)
    for unit in engine.store.units:
        plane = engine.store.plane(unit, "grad")
        inside = sum(float(value.double().square().sum()) for value in plane.views())
        assert sum(float(section.double().square().sum()) for section in plane.tensors()) == pytest.approx(inside), "padding is 0"
    engine.close()


# -------------------------------------------------------------------- what travels


def test_a_wave_uploads_each_part_once_and_the_heads_again_but_those_at_the_turn() -> None:
    """2P - 2 parts of the head with two slots, P of the embedding; gradients once."""
    engine = make_engine(small_model(layers=2), replace(BASE, num_slots=4, end_parts=4))
    engine.step(micro_batches(2), lr=0.0)
    engine.settle()
    sizes = {unit.index: unit.layout.bytes(engine.store.specs["weight"]) for unit in engine.store.units}
    head = engine._sweep.head_parts
    assert head is not None and len(head.parts) == 4
    again = sum(part.layout.bytes(engine.store.specs["weight"]) for part in head.parts[:-2])
    assert engine.feed.uploaded_bytes == sum(sizes.values()) + again
    assert engine.drain.drained_bytes == sum(unit.layout.bytes(engine.store.specs["grad"]) for unit in engine.store.units)
    engine.close()


# -------------------------------------------------------------------- nothing to train, evaluation


def test_micro_batches_without_labels_add_nothing() -> None:
    first, second = micro_batches(2)
    model = small_model()
    alone, expected = one_step(model, BASE, [first])
    for batches in ([masked(second), first], [first, masked(second)]):
        report, found = one_step(model, BASE, batches)
        assert report.loss == pytest.approx(alone.loss, rel=8 * UNIT)
        for entry, value in expected.items():
            assert torch.allclose(found[entry], value, rtol=0, atol=32 * UNIT * float(value.abs().max())), entry


@pytest.mark.parametrize("name", ["plain", "scaled embedding, soft-capped, untied", "positions beside"])
def test_evaluation_is_that_of_whole_ends(name: str) -> None:
    model, held_out = model_of(name), micro_batches(3, seed=4)
    losses = []
    for parts in (1, 3):
        engine = make_engine(model, replace(BASE, end_parts=parts))
        losses.append(engine.evaluate(held_out).loss)
        engine.close()
    assert abs(losses[0] - losses[1]) <= 2 * (96 + 8) * UNIT * losses[0]


def test_an_id_beyond_the_vocabulary_is_not_taken_for_another() -> None:
    (batch,) = micro_batches(1)
    ids = batch.input_ids.clone()
    ids[0, 3] = 96
    engine = make_engine(small_model(), BASE)
    report = engine.step([replace(batch, input_ids=ids)], lr=1e-2)
    assert report.skipped and report.loss != report.loss
    engine.close()


# -------------------------------------------------------------------- what cannot be


def test_tied_ends_are_refused() -> None:
    with pytest.raises(PlanError, match="end_parts: 3: llama: embedding and head share a weight"):
        make_engine(small_model(tie_word_embeddings=True), BASE)


@pytest.mark.parametrize(
    "objective", [OnLogits(lambda logits, labels: logits.sum()), OnHidden(lambda hidden, batch: hidden.sum())]
)
def test_objectives_that_need_the_whole_head_are_refused(objective: Any) -> None:
    engine = make_engine(small_model(), BASE)
    with pytest.raises(PlanError, match="needs the whole head, which this plan feeds in 3 parts: load with end_parts=1"):
        engine.step(micro_batches(1), objective, lr=0.0)
    with pytest.raises(PlanError, match="needs the whole head"):
        engine.evaluate(micro_batches(1), objective)
    engine.close()
