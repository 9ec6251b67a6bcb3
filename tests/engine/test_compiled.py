"""Compiled layers: few graphs for many shapes, never eager in silence, and a layer that does not compile still trains."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from layerferry.engine.compiled import KEEPS_MORE, budget_backend, preparer
from layerferry.models import or_eager
from layerferry.models.attention_outputs import AttentionOutputs
from layerferry.models.or_eager import CompiledOrEager
from layerferry.models.template import Template
from layerferry.plan import Plan
from tests.conformance.harness import make_engine
from tests.engine.small import small_model


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.silu(self.up(hidden)))


class Counting:
    """A backend that counts its graphs and compiles them with dynamo's own eager one."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Plain:
    """What the compiler knows of a template."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.run: Any = module


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_many_widths_take_few_graphs_and_none_is_eager() -> None:
    preparer(Plan(compile=True), 8)
    backend, layer = Counting(), Layer()
    compiled = CompiledOrEager(layer, "Layer", backend=backend)
    for width in range(8, 8 + 8 * 20, 8):
        hidden = torch.randn(2, width, 8)
        assert torch.equal(compiled(hidden), layer(hidden))
    assert compiled._run is not layer
    assert backend.graphs <= 3  # the first shape, then one with symbolic sizes, and width 1 would be the third


def test_more_behaviours_than_dynamos_own_limit_are_all_compiled() -> None:
    preparer(Plan(compile=True), 8)
    backend = Counting()
    for width in range(20):
        module = Layer()
        module.up, module.down = nn.Linear(8, 4 + width), nn.Linear(4 + width, 8)
        CompiledOrEager(module, "Layer", backend=backend)(torch.randn(2, 3, 8))
    assert backend.graphs >= 9  # dynamo's default would have stopped at eight, without a word


def test_a_layer_that_does_not_compile_runs_eagerly_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the number of slots, each of which has a template of its own."""

    def broken(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        raise RuntimeError("no such instruction")

    or_eager.say_once.cache_clear()
    layer, hidden = Layer(), torch.randn(2, 3, 8)
    slots = [CompiledOrEager(layer, "Layer", cost=KEEPS_MORE, backend=broken) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        results = [compiled(hidden) for compiled in slots for _ in range(3)]
    assert all(torch.equal(result, layer(hidden)) for result in results)
    said = [record.getMessage() for record in caplog.records if "does not compile" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(
        "Layer does not compile and runs eagerly, keeping more than planned: RuntimeError: no such"
    )


def test_an_eager_run_draws_what_the_compiled_one_has_drawn() -> None:
    """The first of two graphs compiles and has drawn its numbers when the second does not."""
    graphs = []

    def broken(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        graphs.append(graph)
        if len(graphs) > 1:
            raise RuntimeError("no such instruction")
        return graph.forward

    def function(hidden: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(hidden, 0.5)
        torch._dynamo.graph_break()
        return dropped * 2 + torch.rand(3)

    hidden, found = torch.randn(4, 3), []
    for run in (function, CompiledOrEager(function, "Layer", backend=broken)):
        torch.manual_seed(0)
        found.append(run(hidden))
    assert len(graphs) == 2 and torch.equal(*found)


def test_an_eager_run_finds_no_traces_of_the_compiled_one() -> None:
    """Router logits are noted, and attention is answered from what was recorded, before the second graph fails to compile."""
    query, results, graphs = torch.randn(1, 2, 4, 8), [], []
    template = Template.__new__(Template)
    template.routed, template.attention = [torch.zeros(1)], AttentionOutputs()

    def broken(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        graphs.append(graph)
        if len(graphs) == 2:
            raise RuntimeError("no such instruction")
        return graph.forward

    @torch.compiler.disable
    def note(logits: torch.Tensor) -> None:
        template.routed.append(logits)

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        note(hidden)
        first = template.attention.call(nn.functional.scaled_dot_product_attention, hidden, hidden, hidden)
        return template.attention.call(nn.functional.scaled_dot_product_attention, first + 1, hidden, hidden) * 2

    with template.attention.recording(results):
        expected = layer(query)
    for done, under in ((0, template.attention.answering), (2, template.attention.recording)):
        graphs.clear()
        torch.compiler.reset()
        kept, number = (results if done == 0 else []), len(template.routed)
        with under(kept):
            found = CompiledOrEager(layer, "Layer", remember=template.remember, backend=broken)(query)
        assert len(graphs) == 2 and torch.equal(found, expected)
        assert len(template.routed) == number + 1 and len(kept) == done


def test_a_layer_whose_backward_does_not_compile_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor leaves the backward for later, when a graph of the forward can no longer be replaced."""
    from torch._inductor import compile_fx

    def broken(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        if options.get("is_backward"):
            raise RuntimeError("no such instruction")
        return graph

    monkeypatch.setattr("torch._functorch.config.enable_autograd_cache", False)  # it knows the graph of an earlier run
    monkeypatch.setattr(compile_fx, "compile_fx", functools.partial(compile_fx.compile_fx, inner_compile=broken))
    layer, hidden = Layer(), torch.randn(2, 3, 8)
    compiled = CompiledOrEager(layer, "Layer", backend=budget_backend(1.0))
    found = torch.autograd.grad(compiled(hidden).square().sum(), list(layer.parameters()))
    assert compiled._run is layer
    assert all(map(torch.equal, found, torch.autograd.grad(layer(hidden).square().sum(), list(layer.parameters()))))


def test_without_compile_a_template_is_left_alone() -> None:
    template = Plain(Layer())
    preparer(Plan(compile=False), 8)(template, 1.0)  # type: ignore[arg-type]
    assert template.run is template.module


def test_a_layer_is_compiled_under_its_own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(compile=True, activation_budget=0.0, richer_layers=2, richer_budget=0.7)
    wanted = []

    def backend_of(budget: float) -> Any:
        wanted.append(budget)
        return Counting()

    monkeypatch.setattr("layerferry.engine.compiled.budget_backend", backend_of)
    model = small_model()
    engine = make_engine(model, replace(plan, num_slots=2))
    slots = engine.feed.pool_of[engine.skeleton.layer_units[0].buffers].slots
    templates = engine._sweep.layer.templates
    bound = [templates.bound(index, slot) for index in range(len(engine.skeleton.layer_units)) for slot in slots]
    engine.close()
    assert all(template.run._remember == template.remember for template in bound), "traces of a failure are taken back"
    # one template for every budget and slot, whatever the number of layers
    assert sorted(wanted) == [0.0, 0.0, 0.7, 0.7] and len(set(map(id, bound))) == 4


def test_a_budget_has_one_backend() -> None:
    assert budget_backend(0.5) is budget_backend(0.5)
    assert budget_backend(0.5) is not budget_backend(0.3)
