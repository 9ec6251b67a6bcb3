"""Every named template against LLaMA-Factory: token ids and labels of our rows, thinking on, off and unset."""

from __future__ import annotations

from typing import Any

import pytest

from layerferry.config import DataConfig
from layerferry.data import templates, tools
from layerferry.data.rows import BadRow, Conversation, Message
from layerferry.data.tokenize import SlotEncoder
from layerferry.errors import DataError
from tests.data import lf

THINKING = {"True": True, "False": False, "None": None}
FAMILIES = (
    "alpaca",
    "chatml",
    "deepseek",
    "deepseek3",
    "deepseekr1",
    "default",
    "empty",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "glm4",
    "glm4_7",
    "glmz1",
    "gpt_oss",
    "granite3",
    "llama2",
    "llama3",
    "llama4",
    "mimo",
    "mistral",
    "mistral_small",
    "olmo",
    "phi",
    "phi4",
    "qwen",
    "qwen3",
    "qwen3_nothink",
    "qwen3_5",
    "smollm2",
    "vicuna",
    "yi",
    "zephyr",
)
THOUGHT_IN_CALL, TWO_CALLS, WITH_TOOLS = 5, 6, (4, 5, 6)
"""Places in rows.json."""


@pytest.fixture(autouse=True)
def _the_goldens_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "today", lambda: lf.DATE)


def encode(name: str, conversation: Conversation, tokenizer: Any, **settings: Any) -> list[list[int]] | None:
    """[ids, labels], or None where we refuse."""
    template = templates.configured(templates.load(name), DataConfig(template=name, **settings))
    template.fix_tokenizer(tokenizer)
    try:
        row = SlotEncoder(template, tokenizer, 2048).encode(conversation)
    except (BadRow, DataError):
        return None
    return [row.input_ids, row.labels]


def expected_refusal(template: templates.Template, index: int) -> bool:
    """Where we part from LLaMA-Factory: it raises on thoughts in fused templates' calls; gemma4's tools are not here."""
    fused = template.kind == "fused" and index == THOUGHT_IN_CALL
    return fused or (template.tool_call_format == "gemma4" and index in WITH_TOOLS)


@pytest.mark.parametrize("name", templates.names())
def test_ids_and_labels_are_llamafactorys(name: str) -> None:
    template = templates.load(name)
    compared = 0
    for thinking in THINKING if template.reasons else ("True",):
        golden = lf.golden("lf_encode")["digests"][f"{name} {thinking}"]
        tokenizer = lf.tokenizer()
        for index, conversation in enumerate(lf.conversations()):
            if expected_refusal(template, index):
                continue
            ours = encode(name, conversation, tokenizer, enable_thinking=THINKING[thinking])
            assert (ours and lf.digest(ours)) == golden[index], f"{name}, thinking {thinking}: {conversation.origin}"
            compared += 1
    assert compared >= 7


@pytest.mark.parametrize("key", sorted(lf.golden("lf_encode")["whole"]))
def test_whole_goldens(key: str) -> None:
    name, thinking = key.split()
    tokenizer = lf.tokenizer()
    for index, (conversation, golden) in enumerate(zip(lf.conversations(), lf.golden("lf_encode")["whole"][key], strict=True)):
        if not expected_refusal(templates.load(name), index):
            assert encode(name, conversation, tokenizer, enable_thinking=THINKING[thinking]) == golden


def test_the_families_that_users_have_are_among_them() -> None:
    assert set(FAMILIES) <= set(templates.names())
    assert len(FAMILIES) >= 25


@pytest.mark.parametrize("name", FAMILIES)
def test_every_assistant_turn_is_trained(name: str) -> None:
    """FAULTS row 14: not the last one only."""
    tokenizer = lf.tokenizer()
    row = lf.golden("rows")[1]
    ours = encode(name, lf.conversation(row), tokenizer)
    assert ours is not None
    ids, labels = ours
    trained = tokenizer.decode([label for label in labels if label != -100])
    masked = tokenizer.decode([token for token, label in zip(ids, labels, strict=True) if label == -100])
    for message in row["messages"]:
        there, elsewhere = (masked, trained) if message["role"] == "user" else (trained, masked)
        assert message["content"] in there
        assert message["content"] not in elsewhere


def test_fused_template_writes_a_thought_in_a_call() -> None:
    ours = encode("llama2", lf.conversations()[THOUGHT_IN_CALL], tokenizer := lf.tokenizer())
    assert ours is not None
    text = tokenizer.decode(ours[0])
    assert "<think>\nOne call is enough.\n</think>\n\nAction: horn" in text


def test_two_calls_in_glm4_are_a_bad_row() -> None:
    assert encode("glm4", lf.conversations()[TWO_CALLS], lf.tokenizer()) is None


def test_unknown_template_gets_a_hint() -> None:
    with pytest.raises(DataError, match="template qwen_3 is not known: did you mean qwen3"):
        templates.load("qwen_3")


def test_unwritten_tool_format_is_refused_by_name() -> None:
    template, tokenizer = templates.load("gemma4"), lf.tokenizer()
    with pytest.raises(DataError, match=r"template gemma4 writes tools in the format gemma4.*template: auto"):
        template.encode_multiturn(tokenizer, lf.conversations()[4])


def test_unknown_kind_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"templates": {"new": {**templates.table()["templates"]["qwen"], "kind": "NewTemplate"}}}
    monkeypatch.setattr(templates, "table", lambda: table)
    with pytest.raises(DataError, match=r"template new cannot be rendered exactly here \(kind NewTemplate\)"):
        templates.load("new")


def test_unknown_tool_format_is_refused() -> None:
    with pytest.raises(DataError, match="tool_format yaml is not known"):
        templates.configured(templates.load("qwen"), DataConfig(tool_format="yaml"))


def test_train_on_prompt_with_efficient_eos_is_refused() -> None:
    with pytest.raises(DataError, match="template glm4 does not support train_on_prompt"):
        templates.configured(templates.load("glm4"), DataConfig(train_on_prompt=True))


@pytest.mark.parametrize("text", ["not json", "{}", '["f"]', '[{"description": "no name"}]'])
def test_bad_tools_are_a_bad_row(text: str) -> None:
    pair = (Message(role="user", content="q"), Message(role="assistant", content="a"))
    template = templates.load("qwen3_5")
    with pytest.raises(BadRow, match="tool"):
        template.encode_multiturn(lf.tokenizer(), Conversation(messages=pair, tools=text))


@pytest.mark.parametrize("text", ["not json", "[1]", '{"name": "f"}', '{"arguments": {}}'])
def test_bad_calls_are_a_bad_row(text: str) -> None:
    pair = (Message(role="user", content="q"), Message(role="function", content=text))
    with pytest.raises(BadRow, match="a function message"):
        templates.load("qwen").encode_multiturn(lf.tokenizer(), Conversation(messages=pair))


def test_arguments_that_are_no_object_are_a_bad_row_where_they_are_spelled_out() -> None:
    pair = (Message(role="user", content="q"), Message(role="function", content='{"name": "f", "arguments": "x"}'))
    for name in ("qwen3_5", "lfm2", "glm4_moe"):
        with pytest.raises(BadRow, match="not an object"):
            templates.load(name).encode_multiturn(lf.tokenizer(), Conversation(messages=pair))


def test_fixing_the_tokenizer_is_idempotent_and_counts() -> None:
    tokenizer = lf.tokenizer()
    template = templates.load("qwen3")
    assert template.fix_tokenizer(tokenizer) == 0
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert templates.load("hy3").fix_tokenizer(lf.tokenizer()) == 0
    tokenizer = lf.tokenizer()
    template = templates.load("starchat")
    added = template.fix_tokenizer(tokenizer)
    assert template.fix_tokenizer(tokenizer) == 0
    assert len(tokenizer) == len(lf.tokenizer()) + added
