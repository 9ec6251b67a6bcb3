"""What a config says of a model that weights do not: every difference that decides numbers, and none that does not."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from layerferry.errors import CheckpointError
from layerferry.trainer import train
from layerferry.trainer.model_changes import model_changes
from tests.reliability.runs import cut, make_config, prepare

SAID = "the model's config has changed since the checkpoint: "
BEFORE = {"transformers_version": "5.24.0", "hidden_act": "silu", "rope_parameters": {"rope_theta": 1e4}, "dtype": "bfloat16"}


def changes(tmp_path: Path, **now: Any) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(BEFORE))
    return model_changes(tmp_path, json.dumps({**BEFORE, **now}).encode())


def test_what_is_told(tmp_path: Path) -> None:
    assert changes(tmp_path) == []
    assert changes(tmp_path, dtype="float32", use_cache=False, architectures=["X"]) == []
    assert changes(tmp_path, hidden_act="gelu", rope_parameters={"rope_theta": 5e4}, rms_norm_eps=1e-3) == [
        'hidden_act: "silu" -> "gelu"',
        "rms_norm_eps: not set -> 0.001",
        "rope_parameters.rope_theta: 10000.0 -> 50000.0",
    ]
    assert changes(tmp_path, transformers_version="5.17.0", new_key=1, hidden_act="gelu") == ['hidden_act: "silu" -> "gelu"']
    many = changes(tmp_path, layer_types=["full_attention"] * 99)
    assert len(many) == 1 and len(many[0]) < 100 and many[0].endswith(" ...")


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000])
def test_a_config_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="config.json: "):
        model_changes(tmp_path, b"{}")


def test_a_resumed_run_says_what_its_model_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, output = prepare(tmp_path), tmp_path / "out"
    train(make_config(base, output, max_steps=2))
    config = json.loads((base / "model" / "config.json").read_text())
    edits = {"rms_norm_eps": 0.01, "hidden_act": "gelu", "attention_dropout": 0.2, "num_attention_heads": 4, "head_dim": 4}
    edits |= {"num_key_value_heads": 2}

    def told(**changes: Any) -> list[str]:
        again = tmp_path / "again"
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(output, again)
        cut(again, 1)
        (base / "model" / "config.json").write_text(json.dumps({**config, **changes}))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "layerferry"):
            train(make_config(base, again, max_steps=2))
        lines = [record.getMessage() for record in caplog.records]
        return sorted(line.removeprefix(SAID).partition(":")[0] for line in lines if line.startswith(SAID))

    assert told(use_cache=False, torch_dtype="float32") == []
    assert told(**edits) == sorted(edits)
    assert told(rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == ["rope_parameters.rope_theta"]
