"""Which tables may be fed some rows at a time; those that are used otherwise are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerferry.models.embedding import EmbeddingTap, LookUp, ServedTap
from layerferry.models.inputs import Inputs
from layerferry.models.skeleton import Skeleton
from layerferry.models.tables import standing_in
from tests.conformance.families import FAMILIES, Family, tiny_config
from tests.models.test_linear_head import skeleton_of

UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize("family", [f for f in FAMILIES if not tiny_config(f).tie_word_embeddings], ids=lambda f: f.model_type)
def test_every_untied_family_can_be_divided(family: Family) -> None:
    skeleton = skeleton_of(family.model_type)
    assert skeleton.undividable is None
    assert len(skeleton.prologue_unit.tables) == 1 and skeleton.epilogue_unit.tables
    assert all(p.device.type == "meta" for p in skeleton.model.parameters()), "the trial leaves nothing bound"


def test_tied_ends_are_whole() -> None:
    skeleton = skeleton_of("llama", tie_word_embeddings=True)
    assert not any(unit.tables for unit in skeleton.units)
    assert skeleton.undividable is not None and "share a weight" in skeleton.undividable


def test_positions_and_norms_are_no_tables() -> None:
    assert skeleton_of("gpt2", **UNTIED).prologue_unit.tables == ("transformer.wte.weight",)
    assert skeleton_of("bloom", **UNTIED).prologue_unit.tables == ("transformer.word_embeddings.weight",)


@pytest.mark.parametrize("how", ["a sum of the table", "other ids", "a norm of rows"])
def test_a_table_that_is_used_otherwise_is_whole(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
        if how == "a norm of rows":
            return F.embedding(ids, self.weight, max_norm=1.0)
        found = F.embedding(ids + 0 if how == "other ids" else ids, self.weight)
        return found + self.weight.sum() if how == "a sum of the table" else found

    monkeypatch.setattr(nn.Embedding, "forward", forward)
    skeleton = skeleton_of("llama")
    assert not skeleton.prologue_unit.tables
    assert skeleton.undividable is not None and "not just looked up" in skeleton.undividable


def test_a_head_that_is_no_plain_one_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Skeleton.after_head
    monkeypatch.setattr(Skeleton, "after_head", lambda self, *given: own(self, *given) ** 3)
    skeleton = skeleton_of("llama")
    assert skeleton.undividable is not None and "not a linear map" in skeleton.undividable


# -------------------------------------------------------------------- serving rows


@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("gemma2", UNTIED), ("gpt2", UNTIED)])
@pytest.mark.parametrize("training", [True, False])
def test_served_rows_are_looked_up_rows(model_type: str, changes: dict[str, Any], training: bool) -> None:
    from layerferry.layout import WEIGHT_PLANE, Plane

    skeleton = skeleton_of(model_type, **changes)
    unit, ids = skeleton.prologue_unit, torch.tensor([[5, 9, 5, 0], [1, 2, 3, 95]])
    plane = Plane(unit.layout, WEIGHT_PLANE, torch.zeros(unit.layout.bytes(WEIGHT_PLANE), dtype=torch.uint8))
    for section in plane.tensors():
        section.normal_(generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(training):
        parameters = skeleton.bind(unit, plane)
        expected, _ = skeleton.prologue(Inputs(ids), EmbeddingTap(parameters))
        rows = [plane.view(unit.layout.by_name[name])[ids.flatten()] for name in unit.tables]
        with standing_in(skeleton, unit, torch.device("cpu")) as tables:
            tap = ServedTap(parameters, ids, list(zip(tables, rows, strict=True)))
            found, _ = skeleton.prologue(Inputs(ids), tap)
    assert torch.equal(found, expected) and found.requires_grad is training
    assert [look_up.table for look_up in tap.look_ups if look_up.table is tables[0]] == tables * training


def test_other_ids_than_those_that_were_gathered_are_noticed() -> None:
    ids, table = torch.tensor([1, 2]), nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(AssertionError, match="other ids"), ServedTap((), ids, [(table, torch.zeros(2, 2))]):
        F.embedding(ids.clone(), table)


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("height", [1, 3, 8])
def test_rows_of_parts_are_the_rows_of_the_whole(height: int, padding_idx: int | None) -> None:
    """To the last bit, signs of zeros included: each row's sum has one order."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 8, (2, 9), generator=generator)
    gradient = torch.randn(2, 9, 4, generator=generator)
    gradient[0, 0] = -0.0
    look_up = LookUp(torch.zeros(8, 4), ids, torch.zeros(2, 9, 4), padding_idx)
    whole = torch.randn(8, 4, generator=generator)
    whole[0] = -0.0
    parts = whole.clone()
    look_up.add_gradient(gradient, whole)
    for first in range(0, 8, height):
        look_up.add_gradient(gradient, parts[first : first + height], first)
    assert torch.equal(parts.view(torch.int32), whole.view(torch.int32))
