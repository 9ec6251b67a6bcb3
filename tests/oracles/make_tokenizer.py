"""Regenerates ``tests/goldens/data/tokenizer``: a small byte-level BPE over our own words, with templates' special tokens.

Run: ``python tests/oracles/make_tokenizer.py tests/goldens/data/tokenizer``. Byte-level, so that every text round-trips; about a
thousand merges, so that words are split and token boundaries can differ between one rendering and another.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|<(?:start|end)_of_turn>|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS)\]"
    r"|<turn\|>|<\|turn>"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def special_tokens(table: str) -> list[str]:
    found = set(SPECIAL.findall(table))
    return sorted(found | {"<unk>", "<s>", "</s>", "<|endoftext|>", "[gMASK]", "<sop>"})


def main(folder: str) -> None:
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    root = Path(__file__).parents[2]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    table = json.loads((root / "layerferry/data/templates.json").read_text(encoding="utf-8"))
    names = json.dumps(table["templates"], ensure_ascii=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1400,
        special_tokens=special_tokens(names),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [(root / "tests/goldens/data/rows.json").read_text(encoding="utf-8"), *table["tool_prompts"].values()]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
