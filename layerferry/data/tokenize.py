"""Conversations to token ids and labels: stages sft and pt, with LLaMA-Factory's truncation, masks and packing.

sft: every (asked, answered) pair is cut to what is left of ``cutoff_len``; asked tokens are masked, all answers are trained
(``mask_history``: only the last, and pairs are kept from the end; ``train_on_prompt``: everything). Templates with an
*efficient eos* close a turn by training the end-of-text token on the first token of the next turn. pt: texts with the
end-of-text token, cut, or laid end to end in blocks of ``cutoff_len``. A row whose labels are all masked teaches nothing
and only dilutes a batch: it is a bad row. Checked against LLaMA-Factory by ``tests/data/test_tokenize.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from layerferry.config import DataConfig
from layerferry.data.pack import blocks, chunks, packed
from layerferry.data.rows import BadRow, Conversation
from layerferry.data.samples import Row
from layerferry.data.templates import Piece, Template, to_ids
from layerferry.engine.batch import IGNORE_INDEX

Drop = Callable[[str, str], None]
"""Told the origin of a dropped row and the reason."""


class Encoder(Protocol):
    """A conversation's token ids and labels; raises ``BadRow``. ``prepare`` hears which conversations come next."""

    def prepare(self, conversations: list[Conversation]) -> None: ...

    def encode(self, conversation: Conversation) -> Row: ...


def fit(asked: int, answered: int, budget: int) -> tuple[int, int]:
    """How many tokens of a pair are kept within ``budget``: a short side is kept whole, otherwise both shrink alike."""
    if answered * 2 < budget:
        most = budget
    elif asked * 2 < budget:
        most = budget - asked
    else:
        most = int(budget * (answered / (asked + answered)))
    kept = min(most, answered)
    return min(max(budget - kept, 0), asked), kept


@dataclass(frozen=True)
class SlotEncoder:
    """Encodes by a named template. ``cutoff_len`` is the most tokens a row may have."""

    template: Template
    tokenizer: Any
    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False
    _known: dict[str, list[int]] = field(default_factory=dict)

    def prepare(self, conversations: list[Conversation]) -> None:
        """Tokenise all their texts in one call, which fast tokenizers spread over the cores."""
        texts: dict[str, None] = {}
        for conversation in conversations:
            with suppress(BadRow):  # raised again, and counted, when the row's turn comes
                for pair in self._turns(conversation):
                    texts |= {piece: None for pieces in pair for piece in pieces if isinstance(piece, str) and piece}
        self._known.clear()
        if texts:
            self._known.update(zip(texts, self.tokenizer(list(texts), add_special_tokens=False)["input_ids"], strict=True))

    def _turns(self, conversation: Conversation) -> list[tuple[list[Piece], list[Piece]]]:
        return self.template.turns(conversation, only_last=self.mask_history)

    def encode(self, conversation: Conversation) -> Row:
        pairs = [
            (to_ids(self.tokenizer, asked, self._known), to_ids(self.tokenizer, answered, self._known))
            for asked, answered in self._turns(conversation)
        ]
        closes = self.template.efficient_eos
        total = int(closes)
        kept: list[tuple[list[int], list[int]]] = []  # (ids, labels) per turn, in the order of processing
        for turn, (asked, answered) in enumerate(reversed(pairs) if self.mask_history else pairs):
            if total >= self.cutoff_len:
                break
            asked_len, answered_len = fit(len(asked), len(answered), self.cutoff_len - total)
            asked, answered = asked[:asked_len], answered[:answered_len]
            total += asked_len + answered_len
            trained = not (self.mask_history and turn)
            labels = self._asked_labels(asked, is_first=turn == 0) + (answered if trained else [IGNORE_INDEX] * answered_len)
            kept.append((asked + answered, labels))
        if self.mask_history:
            kept.reverse()
        end = [self.tokenizer.eos_token_id] if closes else []
        ids = [token for turn_ids, _ in kept for token in turn_ids] + end
        labels = [label for _, turn_labels in kept for label in turn_labels] + end
        return checked(Row(input_ids=ids, labels=labels))

    def _asked_labels(self, asked: list[int], *, is_first: bool) -> list[int]:
        """``is_first`` of the turns in the order of processing: with ``mask_history`` the last one, as LLaMA-Factory counts."""
        if self.train_on_prompt:
            return asked
        if self.template.efficient_eos and not is_first:
            # A pair cut to no asked tokens has no label for them; LLaMA-Factory gives it one, alone.
            return ([self.tokenizer.eos_token_id] + [IGNORE_INDEX] * (len(asked) - 1))[: len(asked)]
        return [IGNORE_INDEX] * len(asked)


def checked(row: Row) -> Row:
    """``row``, if any label can ever be a target: the first is nobody's."""
    if all(label == IGNORE_INDEX for label in row.labels[1:]):
        raise BadRow("no trained token is left within cutoff_len")
    return row


def sft_rows(conversations: Iterable[Conversation], encoder: Encoder, data: DataConfig, drop: Drop) -> Iterator[Row]:
    """Rows in order, packed where asked. ``encoder`` must be built with ``sft_cutoff(data)``."""

    def encoded(chunk: list[Conversation]) -> Iterator[Row]:
        encoder.prepare(chunk)
        for conversation in chunk:
            try:
                yield encoder.encode(conversation)
            except BadRow as reason:
                drop(conversation.origin, str(reason))

    for chunk in chunks(conversations, data.preprocessing_batch_size):
        yield from packed(list(encoded(chunk)), sft_cutoff(data)) if packs(data) else encoded(chunk)


def packs(data: DataConfig) -> bool:
    """Whether packing is asked for by name, or implied by neat packing."""
    return bool(data.packing) or data.neat_packing


def sft_cutoff(data: DataConfig) -> int:
    """Tokens a sample may have: LLaMA-Factory keeps one of a pack's ``cutoff_len`` for padding."""
    return data.cutoff_len - 1 if packs(data) else data.cutoff_len


def pt_rows(conversations: Iterable[Conversation], tokenizer: Any, data: DataConfig) -> Iterator[Row]:
    """Texts as rows. ``packing: null`` means blocks here."""
    end = "<|end_of_text|>" if data.template == "llama3" else tokenizer.eos_token
    begins = bool(getattr(tokenizer, "add_bos_token", False)) and tokenizer.bos_token is not None
    joins = data.packing is None or packs(data)
    # LLaMA-Factory takes a token off cutoff_len when packing is asked for by name, but not when stage pt turns it on.
    size = data.cutoff_len - packs(data)
    for chunk in chunks(conversations, data.preprocessing_batch_size):
        texts = [conversation.messages[0].content + end for conversation in chunk]
        if not joins and begins:
            texts = [tokenizer.bos_token + text for text in texts]
        encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        if not joins:
            yield from (_text_row(ids[: data.cutoff_len], tokenizer) for ids in encoded)
            continue
        for ids in blocks(encoded, size):
            if begins:
                ids[0] = tokenizer.bos_token_id
            yield _text_row(ids, tokenizer)


def _text_row(ids: list[int], tokenizer: Any) -> Row:
    # TRAP: where the pad token is the end-of-text token, Hugging Face's collator masks that token wherever it stands, so
    # that LLaMA-Factory
    # does not train it; here padding has its own mask and the end of a text is learnt (tests/data/test_tokenize.py).
    return Row(input_ids=ids, labels=list(ids))
