"""Which experts can be divided, what they are asked, and that a layer with the right answers is the layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerferry.errors import ModelRefused
from layerferry.layout import WEIGHT_PLANE, Plane
from layerferry.models.experts_in_parts import Asked, ExpertsTap, SomeExperts, count_pairs, expert_tables, stacked_experts
from layerferry.units import Part, divide
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import make_engine, real_model

EIGHT = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}


def model_of(name: str) -> Any:
    """With eight experts, by whatever name they are counted."""
    known = tiny_config(BY_TYPE[name])
    return real_model(tiny_config(BY_TYPE[name], **{key: count for key, count in EIGHT.items() if getattr(known, key, None)}))


def layer_of(name: str) -> nn.Module:
    layer: nn.Module = model_of(name).model.layers[-1]
    return layer


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("mixtral", ("gate_up_proj", "down_proj")),
        ("gpt_oss", ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")),
        ("deepseek_v3", ("gate_up_proj", "down_proj")),
        ("llama", ()),
        ("jetmoe", ()),
        ("llama4_text", ()),
    ],
)
def test_stacked_experts_are_found(name: str, tables: tuple[str, ...]) -> None:
    layer = layer_of(name)
    assert sorted(table.rpartition(".")[2] for table in expert_tables(layer)) == sorted(tables)
    assert (stacked_experts(layer) is None) == (not tables)


# -------------------------------------------------------------------- what is asked


def asked_of(index: list[list[int]], *, width: int = 3, experts: int = 6) -> Asked:
    count, choices = len(index), len(index[0])
    values = torch.arange(count * width, dtype=torch.float32).view(count, width)
    return Asked(values, torch.tensor(index), torch.ones(count, choices), experts)


def test_every_chosen_pair_is_in_one_range() -> None:
    """Expert 6 of six is what some families call no expert."""
    asked = asked_of([[0, 5], [3, 3], [2, 6], [5, 0]])
    ranges = [range(2), range(2, 3), range(3, 6)]
    count_pairs([asked])
    found = [asked.pairs(own).tolist() for own in ranges]
    assert found == [[0, 7], [4], [2, 3, 1, 6]]
    hidden, index, weights = asked.chosen(asked.pairs(ranges[2]), ranges[2])
    assert index.tolist() == [0, 0, 2, 2] and len(weights) == 4
    assert torch.equal(hidden, asked.hidden[[1, 1, 0, 3]])


def test_what_is_spread_is_added_where_it_was_asked() -> None:
    """Whole numbers: every order of the sums is the same."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 6, (50, 4), generator=generator)
    asked = Asked(torch.zeros(50, 8), index, torch.ones(50, 4), 6)
    count_pairs([asked])
    values = torch.randint(-99, 99, (200, 8), generator=generator).float()
    sums = torch.zeros(50, 8)
    for own in (range(4), range(4, 6)):
        pairs = asked.pairs(own)
        asked.spread(values[pairs], pairs, sums)
    assert torch.equal(sums, values.view(50, 4, 8).sum(1))


# -------------------------------------------------------------------- a layer around its answers


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_some_experts_are_the_familys_own(name: str) -> None:
    """Their answers add up to those of the whole module: fp32 sums of K terms in another order, here of at most 2."""
    model = model_of(name)
    engine = make_engine(model)
    unit = engine.skeleton.layer_units[-1]
    plane, layer = engine.store.plane(unit, "weight"), engine.skeleton.layers[-1]
    path = stacked_experts(layer)
    assert path is not None
    whole = model.model.layers[-1].get_submodule(path)
    hidden = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))
    index = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(n))[:2] for n in range(20)])
    asked = Asked(hidden, index, torch.rand(20, 2, generator=torch.Generator().manual_seed(3)), 8)
    count_pairs([asked])
    sums = torch.zeros(20, 32)
    _, *parts = divide(unit, 2)
    assert len(parts) == 2
    for part in parts:
        assert isinstance(part, Part)
        buffer = torch.empty(part.layout.bytes(WEIGHT_PLANE), dtype=torch.uint8)
        for at_home, in_piece in part.stretches(plane.spec):
            buffer[in_piece] = plane.buffer[at_home]
        # the tables are fp32 in this engine; a plane of the unit's own spec says where they lie
        own = Plane(part.layout, plane.spec, buffer)
        experts = SomeExperts(layer, part, own.buffer)
        pairs = asked.pairs(experts.experts)
        with torch.no_grad():
            asked.spread(experts(*asked.chosen(pairs, experts.experts)), pairs, sums)
    with torch.no_grad():
        expected = whole(hidden, index, asked.weights)
    assert torch.allclose(sums, expected, rtol=0, atol=2.0**-21 * float(expected.abs().max()))
    engine.close()


class Moe(nn.Module):
    """A layer that scales what its experts are asked, changes it in place afterwards, and squares their answer."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.experts, self.calls, self.gate = Experts(), calls, nn.Parameter(torch.tensor([0.3, -0.7, 0.9]))

    def forward(self, hidden: Tensor) -> Tensor:
        asked = hidden * self.gate
        weights = torch.stack([asked.sum(1), -2 * asked.sum(1)], 1)
        answer = torch.zeros_like(hidden)
        for _ in range(self.calls):
            answer = self.experts(asked, top_k_weights=weights, top_k_index=torch.tensor([[0, 1], [2, 3], [1, 0]]))
        asked.mul_(2)
        return answer.square() + hidden


class Experts(nn.Module):
    is_transposed, num_experts = False, 4

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.table = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))

    def _apply_gate(self) -> None: ...

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return (self.table[top_k_index] * top_k_weights[..., None]).sum(1) * hidden_states.clone()


def test_a_layer_with_the_right_answers_is_the_layer() -> None:
    """Bit for bit, forward and backward, though its experts are not there: values, gradients of the body, of the input."""
    plain, without = Moe(), Moe()
    tap = ExpertsTap(without)
    given = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    leaf = given.clone().requires_grad_(True)
    expected = plain(leaf)
    expected.sum().backward()

    with tap.asking() as asked:
        without(given)
    (one,) = asked
    hidden, weights = one.hidden.requires_grad_(True), one.weights.requires_grad_(True)
    assert one.num_experts == 4 and torch.equal(hidden, given * plain.gate)
    answer = plain.experts(hidden, one.index, weights)
    values = answer.detach().requires_grad_(True)
    with tap.answering(values):
        (slope,) = torch.autograd.grad(without(given).sum(), values)
    slopes = torch.autograd.grad(answer, (hidden, weights), slope)
    own = given.clone().requires_grad_(True)
    with tap.answering(values.detach(), (slopes[0], slopes[1])):
        output = without(own)
    output.sum().backward()
    assert torch.equal(output, expected) and torch.equal(own.grad, leaf.grad)  # type: ignore[arg-type]
    assert torch.equal(without.gate.grad, plain.gate.grad)  # type: ignore[arg-type]
    assert without.experts.table.grad is None


def test_what_is_not_as_it_is_known_is_refused() -> None:
    for layer, said in ((Moe(calls=2), "runs twice in a layer"), (Moe(calls=0), "ran without its experts")):
        tap = ExpertsTap(layer)
        with pytest.raises(ModelRefused, match=rf"Experts: .*{said}: expert_parts: 1 feeds it whole"), tap.asking():
            layer(torch.ones(3, 3))
    layer = Moe()
    tap = ExpertsTap(layer)
    with pytest.raises(ModelRefused, match=r"called with \[\(2, 3\), \(2, 1\), \(1, 2\)\], not hidden"), tap.asking():
        layer.experts(torch.ones(2, 3), torch.ones(2, 1), torch.ones(1, 2))
