"""``template: auto``: the tokenizer's own chat template, token for token, with every assistant turn trained.

The whole conversation is rendered once and tokenised once; what is trained is found as spans of characters. A template with
``{% generation %}`` marks names its spans itself. Otherwise a turn starts where the rendering of everything before it,
asked for an answer, ends, and it ends with what its last position adds behind the answer (the end-of-turn mark, without
white space after it). Templates that rewrite earlier turns (thoughts dropped from the past) are handled, because each span
is looked up in the full rendering. A turn whose span cannot be found is an error, never a mask of zeros. Checked by
``tests/data/test_jinja.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from layerferry.data import tools
from layerferry.data.rows import BETWEEN_RESULTS, FUNCTION, OBSERVATION, BadRow, Conversation, Message
from layerferry.data.samples import Row
from layerferry.data.tokenize import checked
from layerferry.engine.batch import IGNORE_INDEX
from layerferry.errors import DataError

Span = tuple[int, int]
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class JinjaEncoder:
    """Encodes by the tokenizer's chat template; ``default_system`` where a row has no system text."""

    tokenizer: Any
    cutoff_len: int
    default_system: str | None = None
    enable_thinking: bool | None = None
    train_on_prompt: bool = False
    mask_history: bool = False

    def encode(self, conversation: Conversation) -> Row:
        turns = self._turns(conversation)
        listed = tools.parse_tools(conversation.tools) if conversation.tools else None
        text, spans = self._spans(turns, listed, conversation.origin)
        if self.mask_history:
            spans = spans[-1:]
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = list(encoding["input_ids"])
        labels = list(ids) if self.train_on_prompt else _labels(ids, encoding["offset_mapping"], spans)
        if spans and all(label == IGNORE_INDEX for label in labels):
            raise DataError(f"{conversation.origin}: template auto finds no token of the assistant: set template to a name")
        return checked(Row(input_ids=ids[: self.cutoff_len], labels=labels[: self.cutoff_len]))

    def _turns(self, conversation: Conversation) -> list[dict[str, Any]]:
        system = conversation.system or self.default_system
        turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for message in conversation.messages:
            if message.role == FUNCTION:
                turns.append(_call_turn(message))
            elif message.role == OBSERVATION:
                turns += [{"role": "tool", "content": part} for part in message.content.split(BETWEEN_RESULTS)]
            else:
                turns.append({"role": message.role, "content": message.content})
        return turns

    def _spans(self, turns: list[dict[str, Any]], listed: list[dict[str, Any]] | None, origin: str) -> tuple[str, list[Span]]:
        if GENERATION.search(self._source(origin)):
            return self._marked_spans(turns, listed, origin)
        full = self._render(turns, listed, origin)
        spans: list[Span] = []
        for index, turn in enumerate(turns):
            if turn["role"] == "assistant":
                spans.append(self._span(full, turns, index, listed, origin))
        return full, spans

    def _source(self, origin: str) -> str:
        if not isinstance(self.tokenizer.chat_template, str):
            raise DataError("template: auto needs a chat template, and the tokenizer has none: set template to a name")
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError("template: auto needs a fast tokenizer (tokenizer.json) to find the assistant's tokens")
        return str(self.tokenizer.chat_template)

    def _marked_spans(self, turns: list[dict[str, Any]], listed: Any, origin: str) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, indices = render_jinja_template(
            conversations=[turns],
            tools=listed,
            chat_template=self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
            **self._options(),
        )
        return rendered[0], [(start, stop) for start, stop in indices[0]]

    def _options(self) -> dict[str, Any]:
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}

    def _render(self, turns: list[dict[str, Any]], listed: Any, origin: str, *, asks: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                turns, tools=listed, tokenize=False, add_generation_prompt=asks, **self._options()
            )
        except Exception as error:  # jinja2's errors and the template's own raise_exception
            raise BadRow(f"the chat template refuses the row ({str(error).splitlines()[0][:120]})") from None
        return text

    def _span(self, full: str, turns: list[dict[str, Any]], index: int, listed: Any, origin: str) -> Span:
        """The characters of the assistant turn ``index`` in the full rendering."""
        before = self._render(turns[:index], listed, origin, asks=True)
        upto = self._render(turns[: index + 1], listed, origin)
        answer = _answer_text(turns[index], upto[len(common_prefix(before, upto)) :])
        start = len(common_prefix(before, full))
        if start < len(before.rstrip()) and not self._opens_thought(before, start):
            raise self._lost(origin, index)
        place = full.find(answer, start)
        ending = self._ending(upto[upto.rfind(answer) + len(answer) :])
        stop = place + len(answer) + len(ending)
        if place < 0 or not answer or full[place + len(answer) : stop] != ending:
            raise self._lost(origin, index)
        return start, stop

    def _opens_thought(self, before: str, start: int) -> bool:
        """Whether all that the generation prompt has more than the full text is a thought opened for the model."""
        return "<think>" in before[start:] and not before[start:].replace("<think>", "").replace("</think>", "").strip()

    def _ending(self, tail: str) -> str:
        """What closes the turn: up to and including the last special token of the tail, white space after it not trained."""
        return tail.rstrip()

    def _lost(self, origin: str, index: int) -> DataError:
        return DataError(
            f"{origin}: template auto cannot find the tokens of message {index} in the chat template's text: set template to a "
            "name, or give the chat template {% generation %} marks"
        )


def common_prefix(first: str, second: str) -> str:
    """The longest text that both begin with."""
    stop = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return first[:stop]


def _answer_text(turn: dict[str, Any], rendered: str) -> str:
    """What must stand in every rendering of the turn: its content without a thought, or, for a call, the call as rendered."""
    content = THOUGHT.sub("", turn["content"] or "").strip()
    if content and not turn.get("tool_calls"):
        return content
    return THOUGHT.sub("", rendered).strip()


def _call_turn(message: Message) -> dict[str, Any]:
    marked = CALL.search(message.content)
    thought = THOUGHT.match(message.content)
    beside = message.content.replace(marked.group(0), "") if marked else (thought.group(0) if thought else "")
    text = marked.group(1) if marked else message.content[len(beside) :]
    functions = [{"name": call.name, "arguments": call.arguments} for call in tools.parse_calls(text)]
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": beside, "tool_calls": calls}


def _labels(ids: list[int], offsets: list[Span], spans: list[Span]) -> list[int]:
    labels = [IGNORE_INDEX] * len(ids)
    position = 0
    for start, stop in spans:
        while position < len(ids) and offsets[position][0] < start:
            position += 1
        while position < len(ids) and offsets[position][0] < stop:
            labels[position] = ids[position]
            position += 1
    return labels
