"""One row of a data set to one conversation: LLaMA-Factory's alpaca, sharegpt and openai formattings, and direct files.

A conversation alternates: user or observation, then assistant or function. What cannot become one is a ``BadRow`` with its
reason; the caller counts it and goes on, since one broken row in a million must not end a run (and must not vanish
silently). Stricter than LLaMA-Factory in one place: an answer that is empty or null would train the model to say nothing,
so its row is bad. Checked against LLaMA-Factory by ``tests/data/test_rows.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerferry.data.registry import Entry

USER, ASSISTANT, OBSERVATION, FUNCTION, SYSTEM = "user", "assistant", "observation", "function", "system"
ASKING, ANSWERING = (USER, OBSERVATION), (ASSISTANT, FUNCTION)
BETWEEN_RESULTS = "\n</tool_response>\n<tool_response>\n"
"""What LLaMA-Factory puts between the results of several tools, which are one message to it."""
MEDIA_COLUMNS = ("images", "videos", "audios")


class BadRow(Exception):
    """This row cannot be trained on; the message is the reason, without the row's text, so that reasons can be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages in order; ``tools`` is JSON text, as LLaMA-Factory's columns hold it; ``origin`` is file and line."""

    messages: tuple[Message, ...]
    system: str = ""
    tools: str = ""
    origin: str = ""


def convert(row: Any, entry: Entry, origin: str, *, stage: str) -> Conversation:
    """``row`` as a conversation; stage pt asks for the text only."""
    if not isinstance(row, dict):
        raise BadRow("the row is not an object")
    for name in MEDIA_COLUMNS:
        column = entry.columns[name]
        if column and row.get(column):
            raise BadRow(f"the row has {name}, and only text is trained")
    conversation = CONVERTERS[entry.formatting](row, entry, origin)
    _check_text(conversation)
    if stage == "pt":
        if not conversation.messages or not conversation.messages[0].content:
            raise BadRow("the text is empty")
        return conversation
    _check(conversation.messages)
    return conversation


def _check_text(conversation: Conversation) -> None:
    """JSON may escape half of a surrogate pair; that is no text, and tokenizers refuse the whole batch it is in."""
    for text in (conversation.system, conversation.tools, *(message.content for message in conversation.messages)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRow("a text has half of a surrogate pair") from None


def _check(messages: tuple[Message, ...]) -> None:
    if not messages:
        raise BadRow("there is no message")
    for index, message in enumerate(messages):
        if message.role not in (ASKING, ANSWERING)[index % 2]:
            raise BadRow(f"roles do not alternate: {message.role} where {' or '.join((ASKING, ANSWERING)[index % 2])} is due")
        if index % 2 and not message.content.strip():
            raise BadRow("an answer is empty")
    if len(messages) % 2:
        raise BadRow("the last message is not an answer")


def _alpaca(row: dict[str, Any], entry: Entry, origin: str) -> Conversation:
    messages: list[Message] = []
    history = _cell(row, entry.columns["history"])
    if isinstance(history, list):
        for pair in history:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise BadRow("history is not a list of pairs")
            messages.append(Message(role=USER, content=_text(pair[0], "history")))
            messages.append(Message(role=ASSISTANT, content=_text(pair[1], "history")))
    parts = [_cell(row, entry.columns[name]) for name in ("prompt", "query")]
    messages.append(Message(role=USER, content="\n".join(_text(part, "the prompt") for part in parts if part)))
    response = entry.columns["response"]
    if response is not None:
        messages.append(Message(role=ASSISTANT, content=_text(_cell(row, response), "the answer")))
    return Conversation(messages=tuple(messages), system=_system(row, entry), tools=_tools(row, entry), origin=origin)


def _turns(row: dict[str, Any], entry: Entry) -> list[dict[str, Any]]:
    turns = _cell(row, entry.columns["messages"])
    if isinstance(turns, str):  # CSV and some Parquet files hold the list as JSON text
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError):
            raise BadRow("the messages are not JSON") from None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("the messages are not a list of objects")
    return turns


def _role(turn: dict[str, Any], entry: Entry) -> str:
    tag = turn.get(entry.tags["role_tag"] or "")
    for role in (SYSTEM, USER, ASSISTANT, OBSERVATION, FUNCTION):
        if tag is not None and tag == entry.tags[f"{role}_tag"]:
            return role
    raise BadRow(f"unknown role {str(tag)[:40]!r}")


def _content(turn: dict[str, Any], entry: Entry) -> Any:
    return turn.get(entry.tags["content_tag"] or "")


def _sharegpt(row: dict[str, Any], entry: Entry, origin: str) -> Conversation:
    turns = _turns(row, entry)
    system = _system(row, entry)
    if turns and _role(turns[0], entry) == SYSTEM:
        system, turns = _text(_content(turns[0], entry), "the system message"), turns[1:]
    messages = [Message(role=_role(turn, entry), content=_text(_content(turn, entry), "a message")) for turn in turns]
    return Conversation(messages=tuple(messages), system=system, tools=_tools(row, entry), origin=origin)


def _openai(row: dict[str, Any], entry: Entry, origin: str) -> Conversation:
    """As sharegpt, with tool calls as fields of the assistant and one message per tool result.

    LLaMA-Factory 0.9.5 also ends every system prompt with "detailed thinking off" (a line feed alone where there are tools),
    drops the text beside a call, and encodes arguments that are JSON text twice. ``openai_quirks: true`` asks for just that.
    """
    turns = _turns(row, entry)
    system = _system(row, entry)
    if turns and _role(turns[0], entry) == SYSTEM:
        system, turns = _flat_text(_content(turns[0], entry), "the system message"), turns[1:]
    messages: list[Message] = []
    for turn in turns:
        role = _role(turn, entry)
        if role == ASSISTANT and turn.get("tool_calls"):
            messages.append(Message(role=FUNCTION, content=_calls(turn, entry)))
            continue
        content = _flat_text(_content(turn, entry), "a message")
        if role == ASSISTANT and isinstance(turn.get("reasoning_content"), str) and not entry.openai_quirks:
            content = f"<think>\n{turn['reasoning_content']}\n</think>\n\n{content}"
        if role == OBSERVATION and messages and messages[-1].role == OBSERVATION:
            messages[-1] = Message(role=role, content=f"{messages[-1].content}{BETWEEN_RESULTS}{content}")
        else:
            messages.append(Message(role=role, content=content))
    tools = _tools(row, entry)
    if entry.openai_quirks:
        system = f"{system}\n" if system else system
        system += "" if tools else "detailed thinking off"
    return Conversation(messages=tuple(messages), system=system, tools=tools, origin=origin)


def _calls(turn: dict[str, Any], entry: Entry) -> str:
    calls: list[dict[str, Any]] = []
    if not isinstance(turn["tool_calls"], list):
        raise BadRow("the tool calls are not a list")
    for call in turn["tool_calls"]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise BadRow("a tool call has no function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and not entry.openai_quirks:
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError):
                raise BadRow("the arguments of a tool call are not JSON") from None
        calls.append({"name": function["name"], "arguments": arguments})
    text = json.dumps(calls, ensure_ascii=False)
    beside = "" if entry.openai_quirks else (_content(turn, entry) or "")
    return f"{_flat_text(beside, 'a message')}<tool_call>{text}</tool_call>" if beside else text


def _text_row(row: dict[str, Any], entry: Entry, origin: str) -> Conversation:
    return Conversation(messages=(Message(role=USER, content=_text(row.get("text"), "text")),), origin=origin)


def _prompt_completion(row: dict[str, Any], entry: Entry, origin: str) -> Conversation:
    """A direct file: two texts, or two lists of messages."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        before = prompt if isinstance(prompt, list) else [{"role": USER, "content": prompt}]
        after = completion if isinstance(completion, list) else [{"role": ASSISTANT, "content": completion}]
        return _openai({**row, "messages": [*before, *after]}, entry, origin)
    asked = Message(role=USER, content=_text(prompt, "the prompt"))
    answered = Message(role=ASSISTANT, content=_text(completion, "the answer"))
    return Conversation(messages=(asked, answered), system=_system(row, entry), tools=_tools(row, entry), origin=origin)


def _cell(row: dict[str, Any], column: str | None) -> Any:
    return None if column is None else row.get(column)


def _text(value: Any, what: str) -> str:
    if isinstance(value, str):
        return value
    raise BadRow(f"{what} is {'null or missing' if value is None else f'not text ({type(value).__name__})'}")


def _flat_text(value: Any, what: str) -> str:
    """Content in the OpenAI form: text, or a list of text parts."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        return "".join(_text(part, f"a part of {what}") for part in parts)
    return _text(value, what)


def _system(row: dict[str, Any], entry: Entry) -> str:
    value = _cell(row, entry.columns["system"])
    return "" if value is None else _text(value, "the system column")


def _tools(row: dict[str, Any], entry: Entry) -> str:
    value = _cell(row, entry.columns["tools"])
    if not value:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


CONVERTERS: dict[str, Callable[[dict[str, Any], Entry, str], Conversation]] = {
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "openai": _openai,
    "text": _text_row,
    "prompt_completion": _prompt_completion,
}
