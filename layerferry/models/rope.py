"""``rope_scaling``: rotary positions stretched to longer rows, by LLaMA-Factory's rules, in the words of transformers 5.

The factor is what brings the model's own length to the rows' (``cutoff_len``), rounded up; a conversation, whose length nobody
knows, gets twice the length. The model's own length is the one that an earlier stretching started from, where the config
says it. Rows that fit need nothing: one warning, as there. Only the config changes, before a model is made of it, so what is
computed is transformers' own, and the config that is saved says what was trained.

Unlike LLaMA-Factory under transformers 5, the base of the rotation (``rope_theta``) stays the model's own.
Checked by ``tests/models/test_rope.py`` against LLaMA-Factory's numbers and transformers' models.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from layerferry.errors import ConfigError

KINDS = ("linear", "dynamic", "yarn", "llama3")
KEPT = ("rope_theta", "partial_rotary_factor")
"""Of the model's own parameters; the rest belongs to the kind of stretching."""

log = logging.getLogger(__name__)


def stretch(config: Any, kind: str | None, tokens: int | None) -> None:
    """Change ``config`` so that rows of ``tokens`` (None: not known) can be told apart. Raises ``ConfigError`` for models without
    rotary positions, or with several kinds of them."""
    if kind is None:
        return
    text = config.get_text_config()
    known = getattr(text, "rope_parameters", None)
    if not known:
        raise ConfigError(f"rope_scaling: {text.model_type} has no rotary positions that could be stretched: remove it")
    if "rope_type" not in known:
        raise ConfigError(
            f"rope_scaling: {text.model_type} has positions of several kinds ({', '.join(known)}): write rope_parameters into "
            "its config.json instead"
        )
    own = int(known.get("original_max_position_embeddings") or text.max_position_embeddings)
    if tokens is not None and tokens <= own:
        log.warning("rope_scaling: rows of %d tokens fit into the %d positions of the model: nothing is stretched", tokens, own)
        return
    factor = float(math.ceil(tokens / own)) if tokens is not None else 2.0
    parameters = {name: known[name] for name in KEPT if name in known} | {"rope_type": kind, "factor": factor}
    if kind in ("yarn", "llama3"):
        parameters["original_max_position_embeddings"] = own
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "dynamic":
        log.warning("rope_scaling: dynamic stretches rows beyond %d tokens only: none of this run's", int(own * factor))
    text.max_position_embeddings = int(own * factor)
    text.rope_parameters = parameters
    log.info("rope_scaling: %s by %g: %d positions instead of %d", kind, factor, text.max_position_embeddings, own)
