"""Stretched positions: LLaMA-Factory's numbers (``tests/oracles/lf_rope.py``), and transformers' own model with that config."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import layerferry
from layerferry.backends.chaos import ChaosBackend
from layerferry.config import Config, DataConfig, ModelConfig, TrainConfig
from layerferry.engine.batch import MicroBatch
from layerferry.engine.oracle import WholeRows, loss_and_gradients
from layerferry.errors import ConfigError
from layerferry.models.rope import KINDS, stretch
from layerferry.plan import Plan
from tests.conformance.harness import gradients, unequal
from tests.oracles.lf_rope import SMALL

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens/models/lf_rope.json").read_text(encoding="utf-8"))
PLAN = Plan(fp32=True, num_slots=2, num_slabs=1)


def config_with(**positions: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("qwen2", **SMALL, **json.loads(json.dumps(positions)))


@pytest.mark.parametrize(
    "golden", GOLDENS, ids=lambda g: f"{g['kind']} {g['positions']['max_position_embeddings']} {g['tokens']}"
)
def test_the_numbers_are_llama_factorys(golden: dict[str, Any]) -> None:
    config, theirs = config_with(**golden["positions"]), golden["found"]
    stretch(config, golden["kind"], golden["tokens"])
    assert config.max_position_embeddings == theirs["max_position_embeddings"]
    own, wanted = dict(config.rope_parameters), dict(theirs["rope_parameters"])
    assert own.pop("rope_theta") == golden["positions"]["rope_parameters"]["rope_theta"], "theirs loses it under transformers 5"
    wanted.pop("rope_theta", None)
    if wanted["rope_type"] == "dynamic":
        wanted.pop("original_max_position_embeddings")  # transformers 5 does not read it
    assert own == wanted


def test_what_happens_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stretch(config_with(max_position_embeddings=64), "yarn", 64)
    assert "rows of 64 tokens fit into the 64 positions of the model: nothing is stretched" in caplog.text
    stretch(config_with(max_position_embeddings=64), "yarn", 200)
    assert "yarn by 4: 256 positions instead of 64" in caplog.text
    stretch(config_with(max_position_embeddings=64), "dynamic", 200)
    assert "dynamic stretches rows beyond 256 tokens only" in caplog.text


def test_models_without_rotary_positions_and_with_several_kinds_are_refused() -> None:
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match=r"^rope_scaling: gpt2 has no rotary positions that could be stretched: remove it$"):
        stretch(AutoConfig.for_model("gpt2"), "linear", 4096)
    with pytest.raises(ConfigError, match=r"^rope_scaling: gemma3_text has positions of several kinds \(.*full_attention"):
        stretch(AutoConfig.for_model("gemma3_text"), "linear", 1 << 20)


def rows(tokens: int, *, packed: bool) -> list[MicroBatch]:
    """Two micro-batches of full rows; packed ones start again at a third of the row. No id twice."""
    made = []
    for number in range(2):
        ids = (3 + torch.randperm(90, generator=torch.Generator().manual_seed(number)))[:tokens].view(1, tokens)
        third = tokens // 3
        positions = torch.cat([torch.arange(third), torch.arange(tokens - third)])[None] if packed else None
        made.append(MicroBatch(input_ids=ids, labels=ids.clone(), lengths=torch.tensor([tokens]), position_ids=positions))
    return made


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_transformers_model_with_the_config_that_is_saved(tmp_path: Path, kind: str, packed: bool) -> None:
    """A model of 16 positions on rows of 72: the saved folder is loaded by transformers, and gives loss and gradients."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    short = AutoModelForCausalLM.from_config(config_with(max_position_embeddings=16, rope_parameters={"rope_theta": 5e4}))
    short.save_pretrained(tmp_path / "short")
    tokens = 72
    config = Config(
        model=ModelConfig(model_name_or_path=str(tmp_path / "short"), rope_scaling=kind, flash_attn="disabled"),
        data=DataConfig(cutoff_len=tokens),
        train=TrainConfig(fp32=True),
    )
    engine = layerferry.load(tmp_path / "short", config=config, plan=PLAN, backend=ChaosBackend())
    engine.save_pretrained(tmp_path / "long")
    batches = rows(tokens, packed=packed)
    report = engine.step(batches, WholeRows(), lr=0.0, max_grad_norm=0.0)
    saved = AutoConfig.from_pretrained(tmp_path / "long")
    assert saved.max_position_embeddings == 80 and saved.rope_parameters["rope_type"] == kind
    assert saved.rope_parameters["factor"] == 5.0 and saved.rope_parameters["rope_theta"] == 5e4
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "long", dtype=torch.float32, attn_implementation="eager").train()
    loss, expected = loss_and_gradients(reference, batches)
    assert report.loss == float(loss)
    assert not unequal(gradients(engine), expected)
    plain = loss_and_gradients(short.train(), batches)[0]
    assert (float(plain) == float(loss)) == (kind == "dynamic"), "within its reach, dynamic is no stretching"
    engine.close()
