"""What is trained, beside what LLaMA-Factory trains (``tests/oracles/lf_freeze.py``), and one line for what it cannot be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.config import TrainConfig
from layerferry.errors import ConfigError
from layerferry.interop.values import to_list
from layerferry.models.build import build_on_meta
from layerferry.models.frozen import freeze, freeze_alike
from tests.oracles.lf_freeze import SMALL

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens/models/lf_freeze.json").read_text(encoding="utf-8"))


def built(model_type: str = "llama", **changes: Any) -> Any:
    from transformers import AutoConfig

    return build_on_meta(AutoConfig.for_model(model_type, **{**SMALL, **changes}), dtype=torch.float32)


def of(**keys: Any) -> TrainConfig:
    lists = {name: to_list(value) for name, value in keys.items() if isinstance(value, str)}
    return TrainConfig(finetuning_type="freeze", **{**keys, **lists})


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: f"{g['model']} {g['changes'] or ''} {g['keys'] or 'defaults'}")
def test_the_same_parameters_as_in_llama_factory(golden: dict[str, Any]) -> None:
    model = built(golden["model"], **golden["changes"])
    if golden["trained"]:
        freeze(model, of(**golden["keys"]))
        assert trained(model) == set(golden["trained"])
    else:  # LLaMA-Factory raises, or goes on with nothing to train
        with pytest.raises(ConfigError):
            freeze(model, of(**golden["keys"]))


def test_the_goldens_have_both_kinds() -> None:
    assert sum(not golden["trained"] for golden in GOLDENS) >= 5 and sum(bool(golden["trained"]) for golden in GOLDENS) >= 15


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"freeze_trainable_modules": "attn"},
            "freeze_trainable_modules: no module 'attn' in a layer: all, or some of self_attn, ",
        ),
        ({"freeze_trainable_modules": ""}, "freeze_trainable_modules: empty: all, or some of self_attn, mlp, "),
        ({"freeze_extra_modules": "wte"}, "no module 'wte' outside the layers: some of embed_tokens, norm, lm_head$"),
        ({"freeze_trainable_layers": 0}, "freeze_trainable_layers: 0 and no freeze_extra_modules: nothing is left to train"),
        ({"use_llama_pro": True, "freeze_trainable_layers": 3}, "use_llama_pro: .* 4 layers, which .*: 3 does not divide"),
        ({"use_llama_pro": True, "freeze_trainable_layers": -2}, "use_llama_pro: .* 4 layers, which .*: -2 does not divide"),
    ],
)
def test_what_cannot_be_is_one_line(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        freeze(built(), of(**keys))
    assert "\n" not in str(caught.value)


def test_a_tied_head_is_named_by_its_table() -> None:
    line = r"freeze_extra_modules: lm_head shares the weight of embed_tokens: some of embed_tokens, norm$"
    with pytest.raises(ConfigError, match=line):
        freeze(built(tie_word_embeddings=True), of(freeze_extra_modules="lm_head"))


def test_a_module_that_only_frozen_layers_have() -> None:
    """Attention in the first of four layers of jamba."""
    model = built("jamba", attn_layer_period=4, attn_layer_offset=0, num_experts=2, use_mamba_kernels=False, mamba_dt_rank=4)
    with pytest.raises(ConfigError, match=r"freeze_trainable_modules: self_attn: none of the layers \[2, 3\] has it"):
        freeze(model, of(freeze_trainable_modules="self_attn"))


def test_a_name_that_reaches_into_the_layers_says_so_and_a_path_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        freeze(wide := built(), of(freeze_extra_modules="norm", freeze_trainable_layers=1))
    assert "norm is also in the names of 8 parameters inside the layers" in caplog.text and "model.norm is" in caplog.text
    caplog.clear()
    freeze(narrow := built(), of(freeze_extra_modules="model.norm", freeze_trainable_layers=1))
    assert not caplog.text
    assert trained(wide) - trained(narrow) == {name for name in trained(wide) if "layernorm" in name and ".3." not in name}
    assert "model.norm.weight" in trained(narrow)


def test_full_trains_everything() -> None:
    model = built()
    freeze(model, TrainConfig())
    assert len(trained(model)) == len(list(model.parameters()))


def test_a_live_model_is_frozen_alike() -> None:
    live, model = built(), built()
    live.model.embed_tokens.weight.requires_grad_(False)
    freeze_alike(model, live)
    assert trained(model) == trained(live) and len(trained(model)) == len(list(model.parameters())) - 1
    live.requires_grad_(False)
    with pytest.raises(ConfigError, match="every parameter of the model is frozen"):
        freeze_alike(model, live)
