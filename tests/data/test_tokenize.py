"""Truncation, masks, packing and pre-training rows against LLaMA-Factory and against closed formulas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerferry.config import DataConfig
from layerferry.data import templates, tools
from layerferry.data.rows import BadRow, Conversation, Message
from layerferry.data.samples import Row
from layerferry.data.tokenize import SlotEncoder, checked, fit, pt_rows, sft_cutoff, sft_rows
from layerferry.errors import DataError
from tests.data import lf

THOUGHT_IN_CALL = 5


@pytest.fixture(autouse=True)
def _the_goldens_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "today", lambda: lf.DATE)


def encoder(data: DataConfig) -> SlotEncoder:
    assert data.template is not None
    template = templates.configured(templates.load(data.template), data)
    tokenizer = lf.tokenizer()
    template.fix_tokenizer(tokenizer)
    return SlotEncoder(template, tokenizer, sft_cutoff(data), data.train_on_prompt, data.mask_history)


def settings(key: str) -> DataConfig:
    """``"qwen 25 mask_history"`` or ``"qwen {json}"`` as a config."""
    name, rest = key.split(" ", 1)
    if rest.startswith("{"):
        return DataConfig(template=name, **json.loads(rest))
    cutoff, *flags = rest.split()
    return DataConfig(template=name, cutoff_len=int(cutoff), **dict.fromkeys(flags, True))


@pytest.mark.parametrize("key", sorted(lf.golden("lf_cut")))
def test_cut_rows_are_llamafactorys(key: str) -> None:
    data = settings(key)
    ours = encoder(data)
    for index, (conversation, golden) in enumerate(zip(lf.conversations(), lf.golden("lf_cut")[key], strict=True)):
        if ours.template.kind == "fused" and index == THOUGHT_IN_CALL:
            continue  # LLaMA-Factory raises there (test_templates.py)
        try:
            row = ours.encode(conversation)
        except (BadRow, DataError) as error:
            assert golden is None or "no trained token" in str(error)
            continue
        assert lf.digest([row.input_ids, row.labels]) == golden, conversation.origin
        assert len(row.input_ids) <= data.cutoff_len


@pytest.mark.parametrize("key", sorted(lf.golden("lf_pack")))
def test_packs_are_llamafactorys(key: str) -> None:
    """ids, labels, positions; and the segments of neat packing are where positions restart (FAULTS row 15)."""
    name, cutoff, neat = key.split()
    data = DataConfig(template=name, cutoff_len=int(cutoff), packing=True, neat_packing=neat == "True")
    plain = [c for c in lf.conversations() if not c.tools]
    packs = list(sft_rows(plain, encoder(data), data, lambda *_: None))
    golden = lf.golden("lf_pack")[key]
    assert len(packs) == len(golden["input_ids"])
    for index, pack in enumerate(packs):
        real = len(pack.input_ids)
        assert pack.position_ids is not None
        assert pack.input_ids == golden["input_ids"][index][:real]
        assert pack.labels == golden["labels"][index][:real]
        assert pack.position_ids == golden["position_ids"][index][:real]
        assert set(golden["labels"][index][real:]) <= {-100}
        if data.neat_packing:
            segments, segment = [], 0
            for position in pack.position_ids:
                segment += position == 0
                segments.append(segment)
            assert segments == golden["attention_mask"][index][:real]
            assert set(golden["attention_mask"][index][real:]) <= {0}


@pytest.mark.parametrize("key", sorted(lf.golden("lf_pretrain")))
def test_pretraining_rows_are_llamafactorys(key: str) -> None:
    name, packing, bos, cutoff = key.split()
    data = DataConfig(template=name, cutoff_len=int(cutoff), packing={"None": None, "True": True, "False": False}[packing])
    tokenizer = lf.tokenizer()
    templates.load(name).fix_tokenizer(tokenizer)
    tokenizer.add_bos_token = bos == "True"
    texts = [m.content for c in lf.conversations() if not c.tools for m in c.messages]
    rows = [Conversation(messages=(Message(role="user", content=text),)) for text in texts]
    ours = list(pt_rows(rows, tokenizer, data))
    assert [row.input_ids for row in ours] == lf.golden("lf_pretrain")[key]
    assert all(row.labels == row.input_ids and row.position_ids is None for row in ours)


def test_the_end_of_a_text_is_learnt_even_where_it_is_the_padding() -> None:
    tokenizer = lf.tokenizer()
    templates.load("empty").fix_tokenizer(tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    text = Conversation(messages=(Message(role="user", content="The ferry"),))
    (row,) = pt_rows([text], tokenizer, DataConfig(packing=False))
    assert row.labels[-1] == tokenizer.eos_token_id


@given(st.integers(0, 400), st.integers(1, 400), st.integers(1, 300))
def test_fit_keeps_within_the_budget(asked: int, answered: int, budget: int) -> None:
    kept_asked, kept_answered = fit(asked, answered, budget)
    assert 0 <= kept_asked <= asked
    assert 0 <= kept_answered <= answered
    assert kept_asked + kept_answered <= budget
    if asked + answered <= budget:
        assert (kept_asked, kept_answered) == (asked, answered)
    elif answered * 2 < budget:
        assert kept_answered == answered
    elif asked * 2 < budget:
        assert kept_asked == asked


@pytest.mark.parametrize("labels", [[], [5], [-100, -100], [5, -100, -100]])
def test_a_masked_row_is_a_bad_row(labels: list[int]) -> None:
    """FAULTS row 13; a label at the first place is nobody's target."""
    with pytest.raises(BadRow, match="no trained token"):
        checked(Row(input_ids=[1] * len(labels), labels=labels))


def test_ids_and_labels_stay_together_where_nothing_asked_is_left() -> None:
    """An efficient-eos pair cut to no asked tokens: LLaMA-Factory makes one label more than ids."""
    data = DataConfig(template="glm4", cutoff_len=2048)
    ours = encoder(data)
    turns: list[Message] = []
    for _ in range(6):
        turns += [Message(role="user", content="q"), Message(role="assistant", content="a long answer " * 8)]
    for cutoff in range(2, 120):
        cut = SlotEncoder(ours.template, ours.tokenizer, cutoff)
        try:
            row = cut.encode(Conversation(messages=tuple(turns)))
        except BadRow:
            continue
        assert len(row.input_ids) == len(row.labels) <= cutoff


def test_bad_rows_are_dropped_and_told() -> None:
    data = DataConfig(template="qwen", cutoff_len=30, packing=True)
    dropped: list[tuple[str, str]] = []
    bad = Conversation(
        messages=(Message(role="user", content="q"), Message(role="function", content="no json")), origin="x.json:7"
    )
    rows: list[Any] = list(sft_rows([bad, lf.conversations()[0]], encoder(data), data, lambda *told: dropped.append(told)))
    assert len(rows) == 1
    assert dropped == [("x.json:7", "a function message is not JSON")]


@pytest.mark.parametrize("name", ["qwen3", "llama2", "glm4_7"])
def test_preparing_a_chunk_changes_nothing(name: str) -> None:
    one, prepared = encoder(DataConfig(template=name)), encoder(DataConfig(template=name))
    bad = Conversation(messages=(Message(role="user", content="q"), Message(role="function", content="no json")))
    prepared.prepare([bad, *lf.conversations()])
    assert prepared._known
    for conversation in lf.conversations():
        assert prepared.encode(conversation) == one.encode(conversation)
