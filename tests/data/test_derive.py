"""``template: null`` against LLaMA-Factory on several chat templates."""

from __future__ import annotations

import pytest

from layerferry.data import derive, templates
from layerferry.data.tokenize import SlotEncoder
from layerferry.errors import DataError
from tests.data import lf


@pytest.mark.parametrize("name", sorted(lf.golden("lf_derive")))
def test_ids_and_labels_are_llamafactorys(name: str) -> None:
    golden = lf.golden("lf_derive")[name]
    tokenizer = lf.tokenizer()
    tokenizer.chat_template = lf.golden("chat_templates")[name]
    if golden is None:
        with pytest.raises(DataError, match="only user and assistant.*set template to a name, or auto"):
            derive.derive(tokenizer)
        return
    template = derive.derive(tokenizer)
    template.fix_tokenizer(tokenizer)
    encoder = SlotEncoder(template, tokenizer, 2048)
    for conversation, expected in zip(lf.conversations(), golden, strict=True):
        row = encoder.encode(conversation)
        assert lf.digest([row.input_ids, row.labels]) == expected, conversation.origin


def test_no_chat_template_is_the_empty_template() -> None:
    tokenizer = lf.tokenizer()
    tokenizer.chat_template = None
    assert derive.derive(tokenizer) == templates.load("empty")
