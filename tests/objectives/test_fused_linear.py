"""The fused head against fp64 autograd: loss and every gradient, with ignored labels, bias, scale, soft-cap and a tied head.

Right loss and wrong gradient is the fault that such kernels are known for. The reference runs the same head in fp64; what fp32
may be off by is bounded by the rounding of sums: each number here is a sum of at most n = max(C, V, D) products, so n + 8
roundings (the few of softmax, norm and cap included) of the sum of their sizes, which eight times the largest gradient bounds
here; a wrong formula is off by its own size, a thousand times more, and that too is asserted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layerferry.layout import WEIGHT
from layerferry.objectives.cross_entropy import CrossEntropy
from layerferry.objectives.fused_linear import FusedLinear, Shape
from layerferry.objectives.head import Head, Targets
from layerferry.objectives.head_in_parts import HeadInParts
from layerferry.plan import Plan
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import make_engine, masked, real_model
from tests.objectives.heads import HEADS, VOCABULARY, WIDTH, batch, collected, head_of, hidden_states

BOUND = (max(VOCABULARY, WIDTH) + 8) * 2.0**-24


def in_fp64(head: Head, hidden: Tensor, micro_batch: Any, denominator: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, dL/dhidden and parameter gradients by the family's own epilogue, all in fp64."""
    skeleton = head.skeleton
    unit = skeleton.epilogue_unit
    doubles = {}
    for entry in unit.layout.entries:
        name = unit.names[entry.name]
        own = torch.nn.Parameter(skeleton._parameter(name).detach().double())
        skeleton._swap(skeleton._parameter(name), own)
        doubles[entry.name] = own
    targets = Targets.of(micro_batch, hidden.device)
    leaf = hidden.double().reshape(-1, hidden.shape[-1]).requires_grad_(True)
    logits = skeleton.logits(leaf[targets.rows])
    loss = F.cross_entropy(logits.double(), targets.labels, reduction="sum") / denominator
    found = torch.autograd.grad(loss, [leaf, *doubles.values()], allow_unused=True)
    gradients = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(doubles.items(), found[1:], strict=True)}
    assert found[0] is not None
    return loss.detach(), found[0].view_as(hidden), gradients


@pytest.mark.parametrize("chunk_tokens", [4096, 5])
@pytest.mark.parametrize("name", HEADS)
def test_against_fp64(name: str, chunk_tokens: int) -> None:
    _, engine, head = head_of(name, chunk_tokens)
    hidden, micro_batch = hidden_states(), batch()
    fused = CrossEntropy(fused=True)
    loss, gradient = fused.step(head, hidden, micro_batch, 17.0)
    assert isinstance(fused._fused, FusedLinear), "the family's head was not recognised"
    found = collected(head)
    exact_loss, exact_gradient, exact = in_fp64(head, hidden, micro_batch, 17.0)
    assert abs(float(loss - exact_loss)) <= micro_batch.labels.numel() * 8 * 2.0**-24 * float(exact_loss)
    assert_close(gradient, exact_gradient)
    for entry, expected in exact.items():
        assert_close(found[entry], expected)
    assert not gradient[micro_batch.labels.roll(-1, 1) == -100][:-1].any()
    engine.close()


def assert_close(found: Tensor, exact: Tensor) -> None:
    limit = BOUND * max(float(exact.abs().max()), 1e-6) * 8
    assert float((found.double() - exact).abs().max()) <= limit < max(1e-3 * float(exact.abs().max()), 1e-8)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("plain", Shape()),
        ("soft-capped", Shape(cap=2.0)),
        ("scaled", Shape(scale=0.0625)),
        ("divided", Shape(scale=0.25)),
        ("biased", Shape()),
    ],
)
def test_the_shape_of_a_head_is_found_by_number(name: str, shape: Shape) -> None:
    _, engine, head = head_of(name)
    fused = FusedLinear.of(head, hidden_states().reshape(-1, WIDTH))
    assert fused is not None and fused.shape == shape
    engine.close()


def test_a_cap_is_found_where_logits_are_too_small_to_show_it() -> None:
    """bf16 and weights as they are initialised: 30 * tanh(x / 30) is x within rounding for every logit."""
    model = real_model(tiny_config(BY_TYPE["gemma2"], num_hidden_layers=1, final_logit_softcapping=30.0))
    engine = make_engine(model, Plan(num_slots=2))
    unit = engine.skeleton.epilogue_unit
    head = Head(engine.skeleton, engine.skeleton.bind(unit, engine.store.plane(unit, WEIGHT)), None, 4096)
    hidden = hidden_states().reshape(-1, WIDTH).bfloat16()
    logits = head.logits(hidden)
    assert logits.abs().max() < 2  # off by less than 2**3 / (3 * 30**2), half a rounding of the largest
    fused = FusedLinear.of(head, hidden)
    assert fused is not None and fused.shape == Shape(cap=30.0)
    engine.close()


def test_one_objective_serves_models_with_other_heads() -> None:
    objective = CrossEntropy(fused=True)
    for name, shape in (("plain", Shape()), ("scaled", Shape(scale=0.0625)), ("plain", Shape())):
        _, engine, head = head_of(name)
        objective.step(head, hidden_states(), batch(), 17.0)
        assert objective._fused is not None and objective._fused.shape == shape
        engine.close()


def test_a_head_that_is_something_else_keeps_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, head = head_of("plain")
    own = type(engine.skeleton).logits
    monkeypatch.setattr(type(engine.skeleton), "logits", lambda self, hidden: own(self, hidden) ** 3)
    objective = CrossEntropy(fused=True)
    objective.step(head, hidden_states(), batch(), 17.0)
    assert objective._fused is None
    engine.close()


def test_nothing_to_train_is_zero_without_a_crash() -> None:
    _, engine, head = head_of("plain")
    loss, gradient = CrossEntropy(fused=True).step(head, hidden_states(), masked(batch()), 17.0)
    assert loss.item() == 0 and not gradient.any()
    assert not any(value.any() for value in collected(head).values())
    engine.close()


@pytest.mark.parametrize("name", HEADS)
def test_fused_and_reference_train_alike(name: str) -> None:
    """The same step through the engine: every gradient of every unit within the rounding of the head's sums."""
    from tests.conformance.harness import gradients, micro_batches

    model, engine, _ = head_of(name)
    engine.close()
    found = []
    for fused in (False, True):
        trained = make_engine(model)
        trained.step(micro_batches(), CrossEntropy(fused=fused), lr=0.0)
        found.append(gradients(trained))
        trained.close()
    for entry, expected in found[0].items():
        limit = 64 * BOUND * max(float(expected.abs().max()), 1e-6)
        assert float((found[1][entry] - expected).abs().max()) <= limit, entry


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_loss_that_does_not_compile_is_computed_eagerly(cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device beside which there is no C compiler, where layers run eagerly too."""

    def broken(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("no C compiler")

    torch.compiler.reset()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    logits, labels = torch.randn(5, 7), torch.arange(5)
    results = [FusedLinear(Shape(cap=cap), compiled=on)._loss_and_gradient(logits, labels, 0.2, 1.0, cap) for on in (True, False)]
    assert all(map(torch.equal, *results))
    whole = HeadInParts(Shape(cap=cap), compiled=True)
    log_sum, of_label = whole._look(logits, labels, 1.0, cap)
    torch.testing.assert_close((log_sum - of_label).sum() * 0.2, results[0][0])
    torch.testing.assert_close(whole._slope(logits, labels, log_sum, 0.2, 1.0, cap), results[0][1])
    torch.compiler.reset()
