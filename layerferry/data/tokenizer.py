"""The tokenizer, loaded once, with added tokens and its template's tokens in place before anything asks for its length.

The number of added tokens goes back to the caller: where ids reach past the model's embedding, the trainer must resize or refuse.
Checked by ``tests/data/test_tokenizer.py``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerferry.config import Config, ModelConfig
from layerferry.data.pipeline import make_template
from layerferry.data.templates import Template
from layerferry.errors import DataError
from layerferry.models.build import reason, refuse_missing_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """``template`` is None for ``template: auto``; ``num_added`` counts tokens that the tokenizer's files do not have."""

    tokenizer: Any
    template: Template | None
    num_added: int


def load(config: Config) -> Loaded:
    """The tokenizer of ``model_name_or_path`` with ``add_tokens``, ``add_special_tokens`` and the template's tokens."""
    tokenizer = _from_files(config.model)
    before = len(tokenizer)
    if config.model.add_tokens:
        tokenizer.add_tokens(list(config.model.add_tokens), special_tokens=False)
    if config.model.add_special_tokens:
        tokenizer.add_tokens(list(config.model.add_special_tokens), special_tokens=True)
    template = make_template(config, tokenizer)
    if template is not None:
        template.fix_tokenizer(tokenizer)
    elif tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    num_added = len(tokenizer) - before
    if num_added and not config.model.resize_vocab:
        logger.warning(
            "%d tokens are new to the tokenizer (now %d): resize_vocab: true gives them rows", num_added, len(tokenizer)
        )
    return Loaded(tokenizer=tokenizer, template=template, num_added=num_added)


def _from_files(model: ModelConfig) -> Any:
    from transformers import AutoTokenizer

    refuse_missing_folder(model.model_name_or_path)
    path = Path(model.model_name_or_path)
    if path.is_dir() and not any((path / name).is_file() for name in FILES):
        raise DataError(f"{path} has no tokenizer: one of {', '.join(FILES)} is needed beside the model")
    try:
        return AutoTokenizer.from_pretrained(
            model.model_name_or_path,
            revision=model.model_revision,
            cache_dir=model.cache_dir,
            trust_remote_code=model.trust_remote_code,
            split_special_tokens=model.split_special_tokens,
            padding_side="right",
        )
    except Exception as error:  # OSError, ValueError, the hub's and the tokenizers library's own
        raise DataError(f"the tokenizer of {model.model_name_or_path} cannot be loaded: {reason(error)}") from None


FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
"""Any of these makes a folder a tokenizer's."""
