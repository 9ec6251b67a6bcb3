"""LLaMA-Factory's chat templates as data, and our renderer of them.

A template is a row of ``templates.json``: slots for each role, system and prefix, stop words, thought words, flags.
Rendering gives every message a list of pieces, and each text piece is tokenised by itself: token boundaries never cross a
piece, so ids are exactly LLaMA-Factory's. Four kinds differ in behaviour: *plain*; *fused* (Llama 2, Mistral, Gemma: the
system text opens the first user turn); *reasoning* (a thought is taken out or an empty one put in); *glm47* (its empty
thought is the closing word alone). The tokenizer's own chat template, token for token, is another thing: ``template:
auto``, in ``jinja``. Checked against LLaMA-Factory by ``tests/data/test_templates.py``; ``templates.json`` comes from
``tests/oracles/dump_lf_templates.py``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

from layerferry.config import DataConfig
from layerferry.data import tools
from layerferry.data.rows import FUNCTION, OBSERVATION, USER, Conversation, Message
from layerferry.errors import DataError

KINDS = {"Template": "plain", "Llama2Template": "fused", "ReasoningTemplate": "reasoning", "Glm47ReasoningTemplate": "glm47"}
CONTENT = "{{content}}"
NONE_KNOWN: Mapping[str, list[int]] = MappingProxyType({})
SPECIAL_ROLES = ("bos_token", "eos_token")


class Token(NamedTuple):
    """A token by its name in the vocabulary."""

    name: str


class Special(NamedTuple):
    """A token by its role in the tokenizer: bos_token or eos_token; nothing where the tokenizer has none."""

    role: str


Piece = str | Token | Special
Slots = tuple[Piece, ...]
Turn = tuple[list[int], list[int]]
"""Token ids of what is asked and what is answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One row of the table, with the settings of the run."""

    name: str
    kind: str
    user: Slots
    assistant: Slots
    system: Slots
    function: Slots
    observation: Slots
    prefix: Slots
    default_system: str
    stop_words: tuple[str, ...]
    thought_words: tuple[str, str]
    tool_call_words: tuple[str, str]
    efficient_eos: bool
    replace_eos: bool
    tool_call_format: str
    tool_list_format: str | None
    tool_list_slots: Slots = ()
    enable_thinking: bool | None = True
    preserve_thinking: bool = False

    @property
    def reasons(self) -> bool:
        return self.kind in ("reasoning", "glm47")

    def encode_multiturn(self, tokenizer: Any, conversation: Conversation, *, only_last: bool = False) -> list[Turn]:
        """Token ids of every (asked, answered) pair of ``turns``."""
        pairs = self.turns(conversation, only_last=only_last)
        return [(to_ids(tokenizer, asked), to_ids(tokenizer, answered)) for asked, answered in pairs]

    def turns(self, conversation: Conversation, *, only_last: bool = False) -> list[tuple[list[Piece], list[Piece]]]:
        """The pieces of every (asked, answered) pair, for training.

        ``only_last`` says that earlier answers are not trained: a reasoning template then writes them as it does when it
        generates, without their thoughts, unless ``preserve_thinking`` keeps those.
        """
        messages = list(conversation.messages)
        answers = range(1, len(messages), 2)
        as_past = only_last and not self.preserve_thinking
        if self.reasons:
            for index in answers:
                is_past = as_past and index < len(messages) - 1
                if is_past or self.enable_thinking is False:
                    messages[index] = self._without_thought(messages[index])
        written = self._write(replace(conversation, messages=tuple(messages)))
        if self.reasons:
            for index in answers[-1:] if as_past else answers:
                self._add_empty_thought(messages[index], written, index)
        return [(written[index], written[index + 1]) for index in range(0, len(written), 2)]

    def _add_empty_thought(self, message: Message, written: list[list[Piece]], index: int) -> None:
        """An answer without a thought gets an empty one: inside the loss where thinking is on, in front of it where it is off."""
        if any(word.strip() in message.content for word in self.thought_words):
            return
        thought = self.thought_words[1] if self.kind == "glm47" else "".join(self.thought_words)
        if self.enable_thinking:
            written[index].insert(0, thought)
        else:
            written[index - 1].append(thought)

    def _without_thought(self, message: Message) -> Message:
        pattern = "(.*?)".join(map(re.escape, self.thought_words))
        return replace(message, content=re.sub(pattern, "", message.content, flags=re.DOTALL).lstrip("\n"))

    def _write(self, conversation: Conversation) -> list[list[Piece]]:
        """Pieces per message; the first also holds the prefix and, but for fused templates, the system text."""
        system = conversation.system or self.default_system
        tool_text = self._tool_text(conversation.tools)
        head = fill(self.system, system + tool_text) if system or conversation.tools else []
        written: list[list[Piece]] = []
        for index, message in enumerate(conversation.messages):
            pieces: list[Piece] = list(self.prefix) if index == 0 else []
            content = message.content
            if index == 0 and self.kind == "fused" and head:
                assert isinstance(head[0], str), "a fused template's system slot is text"
                content = head[0] + content
            elif index == 0:
                pieces += head
            written.append(pieces + self._pieces(message.role, content))
        return written

    def _pieces(self, role: str, content: str) -> list[Piece]:
        if role == FUNCTION:
            return fill(self.function, self._call_text(content))
        slots = {USER: self.user, OBSERVATION: self.observation}.get(role, self.assistant)
        return fill(slots, content)

    def _tool_text(self, tools_json: str) -> str:
        if not tools_json:
            return ""
        if self.tool_list_format is None:
            return "".join(piece for piece in fill(self.tool_list_slots, tools_json) if isinstance(piece, str))
        listed = tools.parse_tools(tools_json)
        if not listed:
            return ""
        form = self._format(self.tool_list_format)
        return form.list_text(listed, table()["tool_prompts"].get(form.prompt, ""))

    def _call_text(self, content: str) -> str:
        """A function message: thought and text beside the call in front of it, the call in the template's format."""
        thought = re.search("(.*?)".join(map(re.escape, self.thought_words)), content, re.DOTALL)
        if thought:
            content = content.replace(thought.group(0), "")
        marked = re.search("(.*?)".join(map(re.escape, self.tool_call_words)), content, re.DOTALL)
        beside = content.replace(marked.group(0), "") if marked else ""
        calls = tools.parse_calls(marked.group(1) if marked else content)
        return (thought.group(0) if thought else "") + beside + self._format(self.tool_call_format).call_text(calls)

    def _format(self, name: str) -> tools.ToolFormat:
        if name not in tools.FORMATS:
            raise DataError(
                f"template {self.name} writes tools in the format {name}, not there; use template: auto, or tool_format: "
                f"one of {', '.join(tools.FORMATS)}"
            )
        return tools.FORMATS[name]

    def fix_tokenizer(self, tokenizer: Any) -> int:
        """Give the tokenizer the template's end-of-turn, padding and stop tokens; returns how many tokens were new to it."""
        before = len(tokenizer)
        stop_words = list(self.stop_words)
        if self.replace_eos:
            _set_eos(tokenizer, stop_words.pop(0))
        if tokenizer.eos_token_id is None:
            _set_eos(tokenizer, "<|endoftext|>")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if stop_words:
            tokenizer.add_special_tokens({"additional_special_tokens": stop_words}, replace_extra_special_tokens=False)
        return len(tokenizer) - before


def fill(slots: Slots, content: str) -> list[Piece]:
    """The slots with ``content`` in place of its first mark in each."""
    return [slot.replace(CONTENT, content, 1) if isinstance(slot, str) else slot for slot in slots]


def to_ids(tokenizer: Any, pieces: list[Piece], known: Mapping[str, list[int]] = NONE_KNOWN) -> list[int]:
    """Token ids of the pieces, one after another; ``known`` has texts that are tokenised already."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, Token):
            ids.append(tokenizer.convert_tokens_to_ids(piece.name))
        elif isinstance(piece, Special):
            token = getattr(tokenizer, f"{piece.role}_id")
            ids += [] if token is None else [token]
        elif piece in known:
            ids += known[piece]
        elif piece:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids


def _set_eos(tokenizer: Any, token: str) -> None:
    if tokenizer.eos_token != token:
        tokenizer.add_special_tokens({"eos_token": token})


@cache
def table() -> dict[str, Any]:
    text = files("layerferry.data").joinpath("templates.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def names() -> list[str]:
    """The templates that can be named in a config."""
    return list(table()["templates"])


def load(name: str) -> Template:
    """The row ``name`` of the table, with the table's own settings."""
    rows = table()["templates"]
    if name not in rows:
        close = difflib.get_close_matches(name, rows, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise DataError(f"template {name or repr(name)} is not known: {hint}there are {len(rows)}; auto is the tokenizer's own")
    row = rows[name]
    if row["kind"] not in KINDS:
        raise DataError(f"template {name} cannot be rendered exactly here (kind {row['kind']}): use template: auto")
    return Template(
        name=name,
        kind=KINDS[row["kind"]],
        default_system=row["default_system"],
        stop_words=tuple(row["stop_words"]),
        thought_words=(row["thought_words"][0], row["thought_words"][1]),
        tool_call_words=(row["tool_call_words"][0], row["tool_call_words"][1]),
        efficient_eos=row["efficient_eos"],
        replace_eos=row["replace_eos"],
        tool_call_format=row["tool_call_format"],
        tool_list_format=row["tool_list_format"],
        tool_list_slots=_slots(row.get("tool_list_slots", [])),
        user=_slots(row["user"]),
        assistant=_slots(row["assistant"]),
        system=_slots(row["system"]),
        function=_slots(row["function"]),
        observation=_slots(row["observation"]),
        prefix=_slots(row["prefix"]),
    )


def _slots(given: list[Any]) -> Slots:
    def piece(slot: Any) -> Piece:
        if isinstance(slot, str):
            return slot
        return Token(slot["token"]) if "token" in slot else Special(slot["special"])

    # LLaMA-Factory writes nothing for a special slot of any other name (phi_small has one); a real token would change the ids.
    known = (slot for slot in given if not isinstance(slot, dict) or slot.get("special", "eos_token") in SPECIAL_ROLES)
    return tuple(map(piece, known))


def configured(template: Template, data: DataConfig) -> Template:
    """``template`` with the run's settings: system prompt, thinking, tool format."""
    if data.train_on_prompt and template.efficient_eos:
        raise DataError(f"template {template.name} does not support train_on_prompt: its turns share one end-of-text token")
    changes: dict[str, Any] = {}
    if data.tool_format is not None:
        if data.tool_format not in (*tools.FORMATS, "gemma4"):
            raise DataError(f"tool_format {data.tool_format} is not known: {', '.join(tools.FORMATS)}")
        end: Slots = () if template.efficient_eos else (Special("eos_token"),)
        changes |= {"function": (CONTENT, *end), "tool_call_format": data.tool_format, "tool_list_format": data.tool_format}
    if data.default_system is not None:
        changes["default_system"] = data.default_system
    if template.reasons:
        changes |= {"enable_thinking": data.enable_thinking, "preserve_thinking": data.preserve_thinking}
    return replace(template, **changes)
