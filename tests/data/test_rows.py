"""Rows to conversations against LLaMA-Factory's converters; bad rows are named by their reason (FAULTS row 16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerferry.data import registry, rows
from layerferry.data.rows import BadRow, Conversation
from tests.data import lf


def entry(given: dict[str, Any]) -> registry.Entry:
    return registry._entry("ours", {"file_name": "x.json", **given}, Path("."), Path("dataset_info.json"))


def converted(row: Any, given: dict[str, Any], stage: str = "sft") -> Conversation | str:
    try:
        return rows.convert(row, entry(given), "x.json:1", stage=stage)
    except BadRow as reason:
        return str(reason)


@pytest.mark.parametrize("case", sorted(lf.golden("convert_cases")))
def test_conversations_are_llamafactorys(case: str) -> None:
    cases = lf.golden("convert_cases")[case]
    for row, golden in zip(cases["rows"], lf.golden("lf_convert")[case], strict=True):
        ours = converted(row, cases["entry"])
        unusable = golden is None or not golden[0] or len(golden[0]) % 2
        if unusable:
            assert isinstance(ours, str), row
            continue
        assert isinstance(ours, Conversation), ours
        assert [{"role": m.role, "content": m.content} for m in ours.messages] == golden[0]
        assert (ours.system, ours.tools) == (golden[1] or "", golden[2] or "")


OPENAI = {"formatting": "openai", "columns": {"messages": "messages", "tools": "tools"}, "tags": dict(registry.OPENAI_TAGS)}
ASKED = {"role": "user", "content": "q"}


def test_openai_rows_are_left_alone_without_quirks() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "system", "content": "S"},
        ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}], "reasoning_content": "easy"},
    ]
    ours = converted({"messages": turns}, OPENAI)
    assert isinstance(ours, Conversation)
    assert ours.system == "S"
    assert [m.content for m in ours.messages] == [
        "q",
        'I look.<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>',
        "1\n</tool_response>\n<tool_response>\n2",
        "<think>\neasy\n</think>\n\ndone",
    ]


@pytest.mark.parametrize(
    ("row", "given", "reason"),
    [
        ([1], {}, "not an object"),
        ({"instruction": "q", "input": "", "output": ""}, {}, "an answer is empty"),
        ({"instruction": "q", "input": "", "output": "  \n"}, {}, "an answer is empty"),
        ({"instruction": "q", "input": "", "output": None}, {}, "the answer is null or missing"),
        ({"instruction": "q", "input": ""}, {}, "the answer is null or missing"),
        ({"instruction": "q", "input": "", "output": 7}, {}, r"the answer is not text \(int\)"),
        ({"p": "q", "r": "a", "h": [["x"]]}, {"columns": {"prompt": "p", "response": "r", "history": "h"}}, "list of pairs"),
        (
            {"instruction": "q", "output": "a", "images": ["x.png"]},
            {"columns": {"prompt": "instruction", "images": "images"}},
            "images",
        ),
        ({"messages": "nonsense"}, OPENAI, "messages are not JSON"),
        ({"messages": [1]}, OPENAI, "not a list of objects"),
        ({"messages": []}, OPENAI, "there is no message"),
        ({"messages": [ASKED]}, OPENAI, "the last message is not an answer"),
        ({"messages": [ASKED, ASKED]}, OPENAI, "roles do not alternate: user where assistant or function is due"),
        ({"messages": [{"role": "wizard", "content": "q"}]}, OPENAI, "unknown role 'wizard'"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, OPENAI, "a message is null or missing"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, OPENAI, "no function name"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, OPENAI, "not JSON"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": 5}]}, OPENAI, "tool calls are not a list"),
        ({"messages": "[" * 100_000}, OPENAI, "messages are not JSON"),
        ({"instruction": "q \ud800", "output": "a"}, {}, "half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\udfff"}]}, OPENAI, "surrogate"),
    ],
)
def test_bad_rows_name_their_reason(row: Any, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        rows.convert(row, entry(given), "x", stage="sft")


def test_messages_may_be_json_text() -> None:
    ours = converted({"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}, OPENAI)
    assert isinstance(ours, Conversation)
    assert [m.content for m in ours.messages] == ["q", "a"]


def test_text_stage_takes_the_prompt_alone() -> None:
    text = {"columns": {"prompt": "text"}}
    ours = converted({"text": "abc"}, text, "pt")
    assert isinstance(ours, Conversation)
    assert ours.messages[0].content == "abc"
    assert converted({"text": ""}, text, "pt") == "the text is empty"
