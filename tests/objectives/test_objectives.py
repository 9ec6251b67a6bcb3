"""Objectives against plain formulas; chunk- and accumulation-invariance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layerferry.engine.batch import IGNORE_INDEX, MicroBatch
from layerferry.engine.oracle import WholeRows
from layerferry.objectives import CrossEntropy, OnHidden, OnLogits
from layerferry.objectives.head import Targets
from tests.conformance.harness import gradients, make_engine, micro_batches
from tests.engine.small import small_model
from tests.objectives.heads import HEADS, batch, collected, head_of, hidden_states

UNIT = 2.0**-24


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss of one's own, summed over tokens."""
    surprise = F.cross_entropy(logits.float(), labels, reduction="none")
    return ((1 - torch.exp(-surprise)) ** 2 * surprise).sum()


# -------------------------------------------------------------------- targets


def test_labels_are_shifted_once() -> None:
    labels = torch.tensor([[7, 8, 9], [IGNORE_INDEX, IGNORE_INDEX, 5]])
    micro_batch = MicroBatch(input_ids=labels.clamp(min=0), labels=labels, lengths=torch.tensor([3, 3]))
    targets = Targets.of(micro_batch, torch.device("cpu"))
    assert targets.rows.tolist() == [0, 1, 4] and targets.labels.tolist() == [8, 9, 5]
    assert len(targets) == micro_batch.num_targets == 3


def test_the_first_label_and_the_last_position_never_count() -> None:
    labels = torch.tensor([[7, IGNORE_INDEX, IGNORE_INDEX]])
    micro_batch = MicroBatch(input_ids=torch.zeros_like(labels), labels=labels, lengths=torch.tensor([3]))
    assert micro_batch.num_targets == 0 and not len(Targets.of(micro_batch, torch.device("cpu")))


# -------------------------------------------------------------------- cross entropy


@pytest.mark.parametrize("name", HEADS)
def test_leaving_untrained_tokens_out_changes_rounding_only(name: str) -> None:
    """Against every token at once. Terms: the gradient of each trained token alone; each of the two sums is within n - 1
    roundings of the sum of their sizes (and every term within a few of itself, for matrices of another shape)."""
    _, engine, head = head_of(name)
    hidden, micro_batch = hidden_states(), batch()
    loss, gradient = CrossEntropy().step(head, hidden, micro_batch, 17.0)
    ours = collected(head)
    assert head.accumulator is not None
    head.accumulator.buffer.zero_()
    whole_loss, whole_gradient = WholeRows().step(head, hidden, micro_batch, 17.0)
    whole = collected(head)
    count = micro_batch.num_targets
    assert abs(float(loss - whole_loss)) <= 2 * (count + 8) * UNIT * float(whole_loss)
    assert torch.allclose(gradient, whole_gradient, rtol=0, atol=64 * UNIT * float(whole_gradient.abs().max()))
    sizes = {entry: torch.zeros_like(value) for entry, value in whole.items()}
    for row, column in torch.nonzero(micro_batch.labels[:, 1:] != IGNORE_INDEX).tolist():
        labels = torch.full_like(micro_batch.labels, IGNORE_INDEX)
        labels[row, column + 1] = micro_batch.labels[row, column + 1]
        head.accumulator.buffer.zero_()
        CrossEntropy().step(head, hidden, replace(micro_batch, labels=labels), 17.0)
        for entry, value in collected(head).items():
            sizes[entry] += value.abs()
    for entry in whole:
        assert bool(((ours[entry] - whole[entry]).abs() <= 2 * (count + 16) * UNIT * sizes[entry] + 1e-12).all()), entry
    engine.close()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 4096])
def test_chunks_add_up(chunk_tokens: int) -> None:
    _, engine, head = head_of("plain")
    whole_loss, whole_gradient = CrossEntropy().step(head, hidden_states(), batch(), 17.0)
    whole = collected(head)
    _, chunked_engine, chunked = head_of("plain", chunk_tokens)
    loss, gradient = CrossEntropy().step(chunked, hidden_states(), batch(), 17.0)
    assert abs(float(loss - whole_loss)) <= 2 * 32 * UNIT * float(whole_loss)
    for one, other in [(gradient, whole_gradient), *((collected(chunked)[entry], whole[entry]) for entry in whole)]:
        assert torch.allclose(one, other, rtol=0, atol=2 * 32 * UNIT * float(other.abs().max()))
    engine.close()
    chunked_engine.close()


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine, head = head_of("plain", 4)
    seen: list[int] = []
    own = type(engine.skeleton).logits

    def measuring(self: object, hidden: Tensor) -> Tensor:
        seen.append(hidden.shape[0])
        return own(self, hidden)  # type: ignore[arg-type]

    monkeypatch.setattr(type(engine.skeleton), "logits", measuring)
    CrossEntropy().step(head, hidden_states(), batch(), 17.0)
    CrossEntropy().evaluate(head, hidden_states(), batch())
    assert max(seen) == 4 and sum(seen) == 2 * batch().num_targets
    engine.close()


@pytest.mark.parametrize("name", HEADS)
def test_evaluation_is_the_same_loss_not_divided(name: str) -> None:
    _, engine, head = head_of(name)
    loss, _ = CrossEntropy().step(head, hidden_states(), batch(), 1.0)
    assert CrossEntropy().evaluate(head, hidden_states(), batch()).item() == loss.item()
    engine.close()


# -------------------------------------------------------------------- losses of one's own


@pytest.mark.parametrize("count", [1, 3])
def test_on_logits_equals_plain_autograd(count: int) -> None:
    """fp64 autograd over the whole model; fp32 may be off by some hundred roundings of the largest gradient."""
    import copy

    model = small_model()
    batches = micro_batches(count)
    engine = make_engine(model)
    report = engine.step(batches, OnLogits(focal), lr=0.0)
    double = copy.deepcopy(model).double()
    total = sum(each.num_targets for each in batches)
    loss = torch.zeros((), dtype=torch.float64)
    for each in batches:
        logits = double(input_ids=each.input_ids, use_cache=False).logits
        targets = Targets.of(each, torch.device("cpu"))
        rows = logits.flatten(0, 1)[targets.rows]
        surprise = F.cross_entropy(rows, targets.labels, reduction="none")
        loss = loss + ((1 - torch.exp(-surprise)) ** 2 * surprise).sum() / total
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(report.loss - loss.item()) <= 256 * UNIT * loss.item()
    for name, value in gradients(engine).items():
        exact = double.get_parameter(name).grad
        assert exact is not None
        assert float((value.double() - exact).abs().max()) <= 512 * UNIT * float(exact.abs().max()), name
    engine.close()


def test_on_hidden_equals_plain_autograd_and_is_added_up_as_it_stands() -> None:
    import copy

    def pull(hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        return (hidden[:, 0] - hidden[:, -1]).square().sum() / micro_batch.input_ids.shape[1]

    model = small_model()
    batches = micro_batches(2)
    engine = make_engine(model)
    report = engine.step(batches, OnHidden(pull), lr=0.0)
    double = copy.deepcopy(model).double()
    seen: list[Tensor] = []
    double.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for each in batches:
        double(input_ids=each.input_ids, use_cache=False)
    loss = sum((pull(hidden, each) for hidden, each in zip(seen, batches, strict=True)), torch.zeros(()))
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(report.loss - loss.item()) <= 256 * UNIT * loss.item()
    for name, value in gradients(engine).items():
        exact = double.get_parameter(name).grad
        if exact is None:
            assert not value.any(), name
        else:
            assert float((value.double() - exact).abs().max()) <= 512 * UNIT * max(float(exact.abs().max()), 1e-6), name
    engine.close()


def test_cross_entropy_is_on_logits_with_torchs() -> None:
    model = small_model()
    found = []
    for objective in (CrossEntropy(), OnLogits(lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum"))):
        engine = make_engine(model)
        engine.step(micro_batches(), objective, lr=0.0)
        found.append(gradients(engine))
        engine.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
