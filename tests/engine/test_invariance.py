"""One run, whatever the plan: slots, slabs, waves, budget, places, threads and backend do not change a bit (fp32, eager, CPU)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerferry.backends.chaos import ChaosBackend
from layerferry.backends.cpu import CpuBackend
from layerferry.config import OptimConfig
from layerferry.engine.oracle import loss_and_gradients
from layerferry.optim.base import Optimizer
from layerferry.optim.choose import optimizer_for
from layerferry.optim.formats import RESIDUES
from layerferry.plan import Plan
from tests.conformance.harness import gradients, make_engine, masked, micro_batches, unequal
from tests.engine.small import clipped_steps, same, small_model, state
from tests.optim.every_format import EVERY_FORMAT, RULES

BASE = Plan(fp32=True, num_slots=2, num_slabs=1, carry_fp32=True)
STEPS = 3


def run(
    plan: Plan, *, chaos: int | None = None, model: Any = None, optimizer: Optimizer | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Three clipped steps of four micro-batches at changing rates; losses, norms, and the state that is left."""
    backend = CpuBackend() if chaos is None else ChaosBackend(chaos)
    return clipped_steps(make_engine(model or small_model(), plan, backend=backend, optimizer=optimizer), STEPS)


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, Tensor]]:
    return run(BASE)


GRID = list(itertools.product((1, 2, 3, 5), (1, 2), (1, 2, 4), (1.0, 0.0)))


@pytest.mark.parametrize(("num_slots", "num_slabs", "num_waves", "budget"), GRID)
def test_slots_slabs_waves_budget(
    num_slots: int, num_slabs: int, num_waves: int, budget: float, reference: tuple[list[float], dict[str, Tensor]]
) -> None:
    plan = replace(BASE, num_slots=num_slots, num_slabs=num_slabs, num_waves=num_waves, activation_budget=budget)
    seen, left = run(plan, chaos=num_slots + 10 * num_waves)
    assert seen == reference[0]
    assert same(left, reference[1])


@pytest.mark.parametrize(("num_waves", "first_wave", "resident"), [(2, 3, False), (2, 1, True), (3, 2, False), (3, 1, True)])
def test_waves_of_unequal_length(num_waves: int, first_wave: int, resident: bool, reference: Any) -> None:
    plan = replace(BASE, num_waves=num_waves, first_wave=first_wave, resident_gradients=resident, num_slots=3)
    at_host = {"host_inputs": 2, "row_tokens": 16, "rows_per_step": 8, "micro_batch_rows": 2}
    for changed in (at_host, {"turn_layers": 1, "on_device": (1,)}):
        seen, left = run(replace(plan, **changed), chaos=first_wave)
        assert seen == reference[0]
        assert same(left, reference[1])


@pytest.mark.parametrize(("richer_layers", "num_waves"), [(1, 1), (2, 2), (9, 1)])
def test_layers_that_keep_more(richer_layers: int, num_waves: int, reference: Any) -> None:
    plan = replace(BASE, activation_budget=0.0, richer_layers=richer_layers, richer_budget=1.0, num_waves=num_waves)
    seen, left = run(plan, chaos=5)
    assert seen == reference[0]
    assert same(left, reference[1])


@pytest.mark.parametrize("on_device", [(1,), (1, 2, 3), (0, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize(("num_waves", "resident"), [(1, False), (2, False), (2, True)])
def test_places(on_device: tuple[int, ...], num_waves: int, resident: bool, reference: Any) -> None:
    plan = replace(BASE, on_device=on_device, num_waves=num_waves, resident_gradients=resident, optimizer_threads=2)
    seen, left = run(plan, chaos=3)
    assert seen == reference[0]
    assert same(left, reference[1])


@pytest.mark.parametrize("chunk_tokens", [7, 16])
def test_chunks_of_the_head_change_rounding_only(chunk_tokens: int, reference: Any) -> None:
    """A chunk's loss is a sum of n positive terms: another split moves it by 2n roundings at most."""
    seen, _ = run(replace(BASE, chunk_tokens=chunk_tokens))
    tokens = 4 * 32
    assert abs(seen[0] - reference[0][0]) <= 2 * tokens * 2.0**-24 * seen[0]


def test_bf16_is_as_invariant_where_waves_are_carried_in_fp32() -> None:
    plan = replace(BASE, fp32=False)
    expected = run(plan)
    for changed in ({"num_waves": 2}, {"num_slots": 5, "num_slabs": 2}, {"activation_budget": 0.0}):
        seen, left = run(replace(plan, **changed), chaos=1)
        assert seen == expected[0] and same(left, expected[1])


def test_bf16_units_at_home_on_the_device_see_the_same_rounded_gradient() -> None:
    plan = replace(BASE, fp32=False, carry_fp32=False)
    seen, left = run(replace(plan, on_device=(1, 2)), chaos=1)
    expected = run(plan)
    assert seen == expected[0] and same(left, expected[1])


PLACES: list[dict[str, Any]] = [
    {"on_device": (0, 1, 2, 3, 4)},
    {"on_disk": (0, 2, 3)},
    {"on_device": (0,), "on_disk": (1, 4), "num_slots": 5, "optimizer_threads": 2},
]


def with_format(fields: dict[str, Any], plan: Plan, *, chaos: int | None = None) -> tuple[list[float], dict[str, Tensor]]:
    return run(plan, chaos=chaos, optimizer=optimizer_for(OptimConfig(weight_decay=0.1, **fields)))


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    """What AdamW over whole masters leaves."""
    return with_format({}, replace(BASE, fp32=False, carry_fp32=False))[1]


@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_every_format_in_every_place(name: str, plain: dict[str, Tensor]) -> None:
    """Random numbers of stochastic rounding come from step, unit and element: not from places, threads, slots or order. What
    becomes of each when it is resumed: ``tests/checkpoint/test_formats.py``."""
    plan = replace(BASE, fp32=False, carry_fp32=False)
    expected = with_format(EVERY_FORMAT[name], plan)
    for changed in PLACES:
        seen, left = with_format(EVERY_FORMAT[name], replace(plan, **changed), chaos=2)
        assert seen == expected[0] and same(left, expected[1])
    assert same(left, plain) == (name == "adamw_torch over fp32"), "another format is another run"


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_in_every_place_where_weights_are_fp32(rule: str) -> None:
    """A weight of four bytes is the master whatever ``master_weights`` says."""
    expected = with_format(RULES[rule], BASE)
    masters = [{**RULES[rule], "master_weights": master} for master in RESIDUES]
    for number, changed in enumerate(PLACES):
        seen, left = with_format(masters[number], replace(BASE, **changed), chaos=2)
        assert seen == expected[0] and same(left, expected[1])


@pytest.mark.parametrize("changed", [{"num_slots": 5}, {"num_slabs": 2}, {"activation_budget": 0.0}, {"optimizer_threads": 2}])
def test_a_tied_model_too(changed: dict[str, Any]) -> None:
    model = small_model(tie_word_embeddings=True)
    seen, left = run(replace(BASE, **changed), chaos=2, model=model)
    expected = run(BASE, model=small_model(tie_word_embeddings=True))
    assert seen == expected[0] and same(left, expected[1])


def test_waves_of_a_tied_model_change_the_order_of_one_sum_only() -> None:
    """The tied weight's gradient is a sum of eight shares (head and look-up of four micro-batches); another order moves it by
    2 * 7 roundings of the sum of their sizes, which the untied shares below bound."""
    model = small_model(tie_word_embeddings=True)
    batches = micro_batches(4)
    found = []
    for num_waves in (1, 2):
        engine = make_engine(model, replace(BASE, num_waves=num_waves))
        engine.step(batches, lr=0.0)
        found.append(gradients(engine))
        engine.close()
    tied = "model.embed_tokens.weight"
    assert set(unequal(*found)) <= {tied}
    shares = torch.zeros_like(found[0][tied])
    total = sum(batch.num_targets for batch in batches)
    for batch in batches:
        for with_head in (True, False):
            shares += _share(model, batch, total, with_head=with_head).abs()
    assert bool(((found[0][tied] - found[1][tied]).abs() <= 14 * 2.0**-24 * shares).all())


def _share(model: Any, batch: Any, total: int, *, with_head: bool) -> Tensor:
    """The tied weight's gradient through the head only, or through the look-up only."""
    own = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    place = model.lm_head if with_head else model.model.embed_tokens
    kept, place.weight = place.weight, own
    try:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten(), reduction="sum") / total
        return torch.autograd.grad(loss, own)[0]
    finally:
        place.weight = kept


def test_accumulation_is_one_batch() -> None:
    """Four micro-batches of two rows and one of eight are the same gradient. Both are fp32 sums, so each is measured against
    fp64: accumulation may err four times as much as one batch does (four partial sums more), while a dropped or doubly weighted
    micro-batch would be off by a tenth of the gradient."""
    small = micro_batches(4)
    whole = replace(
        small[0],
        input_ids=torch.cat([batch.input_ids for batch in small]),
        labels=torch.cat([batch.labels for batch in small]),
        lengths=torch.cat([batch.lengths for batch in small]),
    )
    model = small_model()
    _, exact = _in_fp64(model, [whole])
    errors = {}
    for name, batches in {"one": [whole], "four": small}.items():
        engine = make_engine(model, BASE)
        engine.step(batches, lr=0.0)
        found = gradients(engine)
        errors[name] = max(float((found[n].double() - exact[n]).abs().max() / exact[n].abs().max()) for n in exact)
        engine.close()
    assert errors["four"] <= 4 * max(errors["one"], 2.0**-22)
    assert errors["one"] < 1e-4


def _in_fp64(model: Any, batches: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    import copy

    double = copy.deepcopy(model).double()
    total = sum(batch.num_targets for batch in batches)
    double.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        logits = double(input_ids=batch.input_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = loss + torch.nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten(), reduction="sum") / total
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, {name: parameter.grad for name, parameter in double.named_parameters() if parameter.grad is not None}


# -------------------------------------------------------------------- labels


def test_the_loss_is_the_mean_over_all_trained_tokens_of_the_step() -> None:
    """Not a mean of means: micro-batches with 4 and with some 22 trained tokens."""
    few, many = micro_batches(2)
    labels = few.labels.clone()
    labels[:, 7:] = -100
    few = replace(few, labels=labels)
    model = small_model()
    engine = make_engine(model)
    report = engine.step([few, many], lr=0.0)
    sums = []
    for batch in (few, many):
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        sums.append(torch.nn.functional.cross_entropy(logits.double(), batch.labels[:, 1:].flatten(), reduction="sum").item())
    expected = sum(sums) / (few.num_targets + many.num_targets)
    mean_of_means = (sums[0] / few.num_targets + sums[1] / many.num_targets) / 2
    assert abs(report.loss - expected) <= 64 * 2.0**-24 * expected < abs(mean_of_means - expected) / 10
    assert report.num_targets == few.num_targets + many.num_targets
    engine.close()


def test_a_masked_row_and_a_masked_micro_batch_add_nothing() -> None:
    first, second, third = micro_batches(3)
    model = small_model()
    for batches in ([masked(first, slice(0, 1)), second], [first, masked(second), third]):
        loss, expected = loss_and_gradients(model, batches)
        engine = make_engine(model)
        report = engine.step(batches, lr=0.0)
        assert abs(report.loss - loss.item()) <= 2 * 96 * 2.0**-24 * loss.item()
        found = gradients(engine)
        layers = [n for n in expected if ".layers." in n]
        assert not unequal({n: found[n] for n in layers}, {n: expected[n] for n in layers})
        engine.close()


def test_a_step_without_any_label_is_skipped_and_changes_nothing() -> None:
    engine = make_engine(small_model())
    engine.step(micro_batches(2), lr=1e-2)
    before, steps = state(engine), engine.num_steps
    report = engine.step([masked(batch) for batch in micro_batches(2)], lr=1e-2)
    assert report.skipped and report.num_targets == 0 and engine.num_steps == steps
    assert same(state(engine), before)
    follow = engine.step(micro_batches(2, seed=1), lr=1e-2)
    assert not follow.skipped and torch.isfinite(torch.tensor([follow.loss, follow.grad_norm])).all()
    engine.close()


def test_a_step_with_a_non_finite_loss_is_skipped_and_changes_nothing() -> None:
    from layerferry.objectives import OnLogits

    engine = make_engine(small_model())
    engine.step(micro_batches(2), lr=1e-2)
    before, steps = state(engine), engine.num_steps
    report = engine.step(micro_batches(2), OnLogits(lambda logits, labels: (logits * torch.inf).sum()), lr=1e-2)
    assert report.skipped and engine.num_steps == steps
    assert same(state(engine), before)
    fresh = make_engine(small_model())
    fresh.step(micro_batches(2), lr=1e-2)
    for each in (engine, fresh):
        each.step(micro_batches(2, seed=1), lr=1e-2)
    assert same(state(engine), state(fresh))
    engine.close()
    fresh.close()


# -------------------------------------------------------------------- evaluation


def test_evaluation_between_steps_changes_nothing_and_is_the_oracles_loss() -> None:
    held_out = micro_batches(5, seed=9)
    with_evaluation, without = make_engine(small_model()), make_engine(small_model())
    for step in range(STEPS):
        for engine in (with_evaluation, without):
            engine.step(micro_batches(2, seed=step), lr=1e-2)
        report = with_evaluation.evaluate(held_out)
        model = small_model()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(state(without)[f"master {name}"])
        model.eval()
        loss, _ = loss_and_gradients(model, held_out)
        tokens = sum(batch.labels.numel() for batch in held_out)
        assert abs(report.loss - loss.item()) <= 2 * tokens * 2.0**-24 * loss.item()
        assert report.num_targets == sum(batch.num_targets for batch in held_out)
    assert same(state(with_evaluation), state(without))
    with_evaluation.close()
    without.close()


def test_evaluation_holds_no_more_than_a_waves_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the set: never more micro-batches at a time than a training wave has, and logits of one chunk at a time."""
    engine = make_engine(small_model(), replace(BASE, rows_per_step=4, micro_batch_rows=2, chunk_tokens=8))
    alive: list[int] = []
    widest: list[int] = []
    sweep = type(engine._sweep)
    original, logits = sweep.evaluate, type(engine.skeleton).logits

    def counting(self: Any, micro_batches: Any, *args: Any, **kwargs: Any) -> Tensor:
        alive.append(len(micro_batches))
        return original(self, micro_batches, *args, **kwargs)

    def measuring(self: Any, hidden: Tensor) -> Tensor:
        widest.append(hidden.shape[0])
        return logits(self, hidden)

    monkeypatch.setattr(sweep, "evaluate", counting)
    monkeypatch.setattr(type(engine.skeleton), "logits", measuring)
    engine.evaluate(micro_batches(9))
    assert max(alive) == 2 and sum(alive) == 9
    assert max(widest) == 8
    engine.close()


def test_evaluating_nothing_is_not_a_number_and_not_a_crash() -> None:
    engine = make_engine(small_model())
    report = engine.evaluate([masked(batch) for batch in micro_batches(2)])
    assert report.num_targets == 0 and report.loss != report.loss
    engine.close()
