"""``template: auto``: the tokenizer's own chat template, token for token, with every assistant turn trained.

The whole conversation is rendered once and tokenised once, so the ids are those that the model was made with. What is
trained: where the template has ``{% generation %}`` marks, what they mark. Otherwise a turn starts where the rendering of
everything before it, asked for an answer, ends, and it ends with the end-of-turn mark (white space after that is not
trained). Templates that write a turn differently once it is past (its thought dropped) or that move the system text are
handled: the turn is looked up in the full rendering, or found by putting a marker in its place. A turn that cannot be found
is an error, never a mask of zeros; so is a call or tool that leaves no trace. Checked by ``tests/data/test_jinja.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from layerferry.data import tools
from layerferry.data.rows import BETWEEN_RESULTS, FUNCTION, OBSERVATION, BadRow, Conversation, Message
from layerferry.data.samples import Row
from layerferry.data.tokenize import checked
from layerferry.engine.batch import IGNORE_INDEX
from layerferry.errors import DataError

Span = tuple[int, int]
Turn = dict[str, Any]
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)
OPENED_THOUGHT = re.compile(r"<think>\s*(</think>)?\s*$")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARKER = "here-stands-the-answer"


@dataclass(frozen=True)
class JinjaEncoder:
    """Encodes by the tokenizer's chat template; ``default_system`` where a row has no system text."""

    tokenizer: Any
    cutoff_len: int
    default_system: str | None = None
    enable_thinking: bool | None = None
    train_on_prompt: bool = False
    mask_history: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer.chat_template, str):
            raise DataError("template: auto needs a chat template, and the tokenizer has none: set template to a name")
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError("template: auto needs a fast tokenizer (tokenizer.json) to find the assistant's tokens")

    def prepare(self, conversations: list[Conversation]) -> None:
        """Nothing to do ahead: here rendering takes the time, and each row is tokenised once."""

    def encode(self, conversation: Conversation) -> Row:
        listed = tools.parse_tools(conversation.tools) if conversation.tools else None
        rendering = _Rendering(self, listed, _turns(conversation, self.default_system), conversation.origin)
        ids, labels = rendering.marked() if GENERATION.search(self.tokenizer.chat_template) else rendering.found()
        if self.train_on_prompt:
            labels = list(ids)
        return checked(Row(input_ids=ids[: self.cutoff_len], labels=labels[: self.cutoff_len]))


@dataclass(frozen=True)
class _Rendering:
    """One conversation under one chat template."""

    encoder: JinjaEncoder
    listed: list[dict[str, Any]] | None
    turns: list[Turn]
    origin: str

    @property
    def answers(self) -> list[int]:
        return [index for index, turn in enumerate(self.turns) if turn["role"] == "assistant"]

    def marked(self) -> tuple[list[int], list[int]]:
        """Ids and labels by the template's own marks."""
        found = self._apply(self.turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids: list[int] = list(found["input_ids"])
        mask: list[int] = list(found["assistant_masks"])
        runs = sum(1 for trained, _ in groupby(mask) if trained)
        if runs < len(self.answers):
            raise DataError(
                f"{self.origin}: the chat template marks {runs} of {len(self.answers)} assistant turns as generated: mend its "
                "{% generation %} marks, or set template to a name"
            )
        if self.encoder.mask_history:
            text = self._apply(self.turns, tokenize=False)
            start = len(common_prefix(self._apply(self.turns[: self.answers[-1]], tokenize=False), text))
            offsets = self.encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            mask = [trained * (offset[0] >= start) for trained, offset in zip(mask, offsets, strict=True)]
        return ids, [token if trained else IGNORE_INDEX for token, trained in zip(ids, mask, strict=True)]

    def found(self) -> tuple[list[int], list[int]]:
        """Ids and labels by looking each turn up in the full text."""
        full: str = self._apply(self.turns, tokenize=False)
        spans = [self._span(full, index) for index in self.answers]
        self._check_tools(full, spans)
        if self.encoder.mask_history:
            spans = spans[-1:]
        encoding = self.encoder.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = list(encoding["input_ids"])
        return ids, _labels(ids, encoding["offset_mapping"], spans)

    def _apply(self, turns: list[Turn], **options: Any) -> Any:
        if self.encoder.enable_thinking is not None:
            options["enable_thinking"] = self.encoder.enable_thinking
        try:
            return self.encoder.tokenizer.apply_chat_template(turns, tools=self.listed, **options)
        except Exception as error:  # jinja2's errors and the template's own raise_exception
            raise BadRow(f"the chat template refuses the row ({str(error).splitlines()[0][:120]})") from None

    def _span(self, full: str, index: int) -> Span:
        """The characters of the assistant turn ``index`` in the full rendering."""
        before: str = self._apply(self.turns[:index], tokenize=False, add_generation_prompt=True)
        upto: str = self._apply(self.turns[: index + 1], tokenize=False).rstrip()
        if full.startswith(before) and full.startswith(upto) and len(upto) > len(before):
            return len(before), len(upto)
        start = _after_prompt(full, before)
        if start is None:
            start = self._marker_start(full, index)
        answer = _answer(self.turns[index]) or THOUGHT.sub("", upto[_after_prompt(upto, before) or 0 :]).strip()
        ending = upto[upto.rfind(answer) + len(answer) :] if answer else ""
        place = full.find(answer + ending, start)
        if place < 0 or not answer:
            raise self._lost(index)
        return start, place + len(answer) + len(ending)

    def _marker_start(self, full: str, index: int) -> int:
        """Where the turn starts, for templates whose earlier text depends on later turns: a marker stands in for the answer."""
        turn = self.turns[index]
        answer = _answer(turn)
        marked: str = self._apply(
            [*self.turns[:index], {**turn, "content": turn["content"].replace(answer, MARKER)}, *self.turns[index + 1 :]],
            tokenize=False,
        )
        head, found, tail = marked.partition(MARKER)
        if not answer or not found or not full.startswith(head + answer) or not full.endswith(tail):
            raise self._lost(index)
        thought = THOUGHT.match(turn["content"])
        return head.rindex("<think>") if thought and "<think>" in head else len(head)

    def _check_tools(self, full: str, spans: list[Span]) -> None:
        for tool in self.listed or ():
            if tools.bare(tool)["name"] not in full:
                raise DataError(f"{self.origin}: the chat template writes no tools: set template to a name")
        for index, (start, stop) in zip(self.answers, spans, strict=True):
            for call in self.turns[index].get("tool_calls", ()):
                if call["function"]["name"] not in full[start:stop]:
                    raise DataError(f"{self.origin}: the chat template writes no tool calls: set template to a name")

    def _lost(self, index: int) -> DataError:
        return DataError(
            f"{self.origin}: template auto cannot find the tokens of message {index} in the chat template's text: set "
            "template to a name, or give the chat template {% generation %} marks"
        )


def common_prefix(first: str, second: str) -> str:
    """The longest text that both begin with."""
    stop = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return first[:stop]


def _after_prompt(text: str, before: str) -> int | None:
    """Where an answer starts in ``text``: behind ``before``, or behind all of it but a thought opened for the model."""
    opened = OPENED_THOUGHT.search(before)
    for prompt in (before, before[: opened.start()] if opened else before):
        if text.startswith(prompt):
            return len(prompt)
    return None


def _answer(turn: Turn) -> str:
    """The content that stands in every rendering: all but a thought. Empty for calls, whose text is the template's."""
    return "" if turn.get("tool_calls") else THOUGHT.sub("", turn["content"]).strip()


def _turns(conversation: Conversation, default_system: str | None) -> list[Turn]:
    system = conversation.system or default_system
    turns: list[Turn] = [{"role": "system", "content": system}] if system else []
    for message in conversation.messages:
        if message.role == FUNCTION:
            turns.append(_call_turn(message))
        elif message.role == OBSERVATION:
            turns += [{"role": "tool", "content": part} for part in message.content.split(BETWEEN_RESULTS)]
        else:
            turns.append({"role": message.role, "content": message.content})
    return turns


def _call_turn(message: Message) -> Turn:
    marked = CALL.search(message.content)
    thought = THOUGHT.match(message.content)
    beside = message.content.replace(marked.group(0), "") if marked else (thought.group(0) if thought else "")
    text = marked.group(1) if marked else message.content[len(beside) :]
    functions = [{"name": call.name, "arguments": call.arguments} for call in tools.parse_calls(text)]
    return {"role": "assistant", "content": beside, "tool_calls": [{"type": "function", "function": one} for one in functions]}


def _labels(ids: list[int], offsets: list[Span], spans: list[Span]) -> list[int]:
    """A token is trained where it reaches into a span: the blank before an answer is often in the answer's first token."""
    labels = [IGNORE_INDEX] * len(ids)
    position = 0
    for start, stop in spans:
        while position < len(ids) and offsets[position][1] <= start:
            position += 1
        while position < len(ids) and offsets[position][0] < stop:
            labels[position] = ids[position]
            position += 1
    return labels
