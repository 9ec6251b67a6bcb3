"""What differs between the model's config and that of the checkpoint which a run goes on from.

Weights fit by their shapes, and most of a config has none: another ``rms_norm_eps`` or ``rope_theta`` would give other numbers
in silence. Both sides are as ``write_config`` writes them, so what the settings have changed (``rope_scaling``,
``moe_aux_loss_coef``, ``resize_vocab``) is seen too. A change is allowed and told; other shapes are refused where weights are
loaded. Checked by ``tests/trainer/test_model_changes.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from layerferry.checkpoint.files import read_small
from layerferry.errors import CheckpointError

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 1 << 26
MOST_CHARACTERS = 60
"""Of a value in a line: a list has an item a layer."""
VERSION_KEY = "transformers_version"
MEANINGLESS = {
    *("_name_or_path", VERSION_KEY, "architectures", "auto_map", "dtype", "torch_dtype", "use_cache", "return_dict"),
    *("id2label", "label2id", "problem_type", "task_specific_params", "pretraining_tp", "initializer_range"),
}
"""Keys, at any depth, that no number of a training step depends on."""


def model_changes(folder: Path, written: bytes) -> list[str]:
    """``key: before -> now`` for what differs in the config of checkpoint ``folder`` and in ``written``, this run's config."""
    path = folder / CONFIG_NAME
    try:
        saved = json.loads(read_small(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: expected an object")
    found = json.loads(written)
    before, now = dict(_leaves(saved)), dict(_leaves(found))
    # another version of the library has keys of its own, and leaves others out
    one_version = saved.get(VERSION_KEY) == found.get(VERSION_KEY)
    keys = sorted(before.keys() | now.keys() if one_version else before.keys() & now.keys())
    return [f"{key}: {_text(before, key)} -> {_text(now, key)}" for key in keys if before.get(key) != now.get(key)]


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and value as JSON."""
    for key, value in config.items():
        if key in MEANINGLESS:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)


def _text(leaves: Mapping[str, str], key: str) -> str:
    text = leaves.get(key, "not set")
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."
