"""Layers that turn with the head: the same bits as going up with all micro-batches and down again, and less that is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from layerferry.engine.oracle import loss_and_gradients
from layerferry.engine.tape import Graph, Tape
from layerferry.errors import PlanError
from layerferry.plan import Plan
from tests.conformance.harness import gradients, make_engine, micro_batches
from tests.engine.small import same, small_model
from tests.engine.test_invariance import BASE, run

LAYERS = 3


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, Tensor]]:
    return run(BASE)


@pytest.mark.parametrize("turn_layers", [1, 2, 3, 9])
@pytest.mark.parametrize(("num_waves", "resident"), [(1, False), (2, False), (2, True), (4, False)])
@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_the_same_bits(turn_layers: int, num_waves: int, resident: bool, budget: float, reference: Any) -> None:
    own = {"num_waves": num_waves, "resident_gradients": resident, "activation_budget": budget}
    slots = min(turn_layers, LAYERS) + (turn_layers < LAYERS)
    for num_slots in (slots, slots + 1):
        seen, left = run(replace(BASE, turn_layers=turn_layers, num_slots=num_slots, **own), chaos=turn_layers + num_slots)
        assert seen == reference[0]
        assert same(left, reference[1])


@pytest.mark.parametrize("on_device", [(1,), (3,), (0, 1, 2), (2, 3, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("num_waves", [1, 2])
def test_wherever_units_live(on_device: tuple[int, ...], num_waves: int, reference: Any) -> None:
    plan = replace(BASE, turn_layers=2, num_slots=3, on_device=on_device, num_waves=num_waves)
    seen, left = run(plan, chaos=4)
    assert seen == reference[0]
    assert same(left, reference[1])


@pytest.mark.parametrize("changed", [{"host_inputs": 1}, {"host_inputs": 3}, {"on_disk": (0, 3)}, {"num_slabs": 2}])
def test_beside_what_others_do(changed: dict[str, Any], reference: Any) -> None:
    """Of layers that are computed again none turns."""
    seen, left = run(replace(BASE, turn_layers=2, num_slots=3, row_tokens=64, rows_per_step=8, **changed), chaos=6)
    assert seen == reference[0]
    assert same(left, reference[1])


def test_a_tied_model_and_bf16() -> None:
    model = small_model(tie_word_embeddings=True)
    for base in (BASE, replace(BASE, fp32=False)):
        expected = run(base, model=model)
        seen, left = run(replace(base, turn_layers=2, num_slots=3), chaos=7, model=model)
        assert seen == expected[0] and same(left, expected[1])


def test_gradients_are_those_of_autograd() -> None:
    model, batches = small_model(), micro_batches(3)
    engine = make_engine(model, replace(BASE, turn_layers=2, num_slots=3))
    engine.step(batches, lr=0.0)
    _, expected = loss_and_gradients(model, batches)
    found = gradients(engine)
    assert all((found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm() for name in expected)


class Counting(Tape):
    """How many graphs there are at most, of layers that turn and of others."""

    most: tuple[int, int] = (0, 0)

    def _graph(self, unit: Any, *args: Any, **kwargs: Any) -> Graph:
        graph = super()._graph(unit, *args, **kwargs)
        alive = [index for index, _ in self._graphs] + [unit.index]
        turning = sum(index > LAYERS - 2 for index in alive)
        Counting.most = (max(Counting.most[0], turning), max(Counting.most[1], len(alive) - turning))
        return graph


def test_what_they_keep_is_there_for_one_micro_batch() -> None:
    batches = micro_batches()
    engine = make_engine(small_model(), replace(BASE, turn_layers=2, num_slots=3))
    engine.tape_type = Counting
    engine.step(batches, lr=0.0)
    assert len(batches) > 1 and Counting.most == (2, len(batches))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"turn_layers": 2, "num_slots": 2}, "num_slots: 2: the 2 layers that turn hold one each"),
        ({"turn_layers": 1, "end_parts": 4}, "turn_layers: 1: layers turn with a head that is there whole"),
    ],
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_engine(small_model(), replace(BASE, **changed))


def test_what_the_layers_keep() -> None:
    plan = Plan(compile=True, activation_budget=0.0, turn_layers=2)
    assert plan.layer_budgets(4) == (0.0, 0.0, 0.7, 0.7)
    assert [level.activation_budget for level in plan.levels] == [0.0, 0.7]
    assert replace(plan, richer_layers=1, richer_budget=0.5).layer_budgets(4) == (0.0, 0.5, 0.7, 0.7)
    assert replace(plan, kept_attention=1).first_turning(4) == 4


def test_frozen_layers_that_the_backward_does_not_come_to_need_no_slots() -> None:
    """All four layers are to turn, but only the last can: two slots do."""
    model = small_model(layers=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3." in name)
    expected = run(BASE, model=model)
    seen, left = run(replace(BASE, turn_layers=4, num_slots=2), chaos=8, model=model)
    assert seen == expected[0] and same(left, expected[1])
