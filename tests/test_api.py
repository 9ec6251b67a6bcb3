"""``layerferry.load``: what is given is used or refused, never passed over. Its results are the engine's tests' affair."""

from __future__ import annotations

import pytest

import layerferry
from layerferry.config import Config, ModelConfig
from layerferry.errors import ConfigError
from layerferry.plan import Plan
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import real_model


def test_engine_options_are_those_of_the_engine_section() -> None:
    model = real_model(tiny_config(BY_TYPE["llama"]))
    engine = layerferry.load(model, plan=Plan(), device="chaos")
    assert engine.backend.name == "chaos"
    engine.close()
    with pytest.raises(TypeError, match="devise"):
        layerferry.load(model, plan=Plan(), devise="cpu")


def test_engine_options_beside_a_config_are_not_passed_over() -> None:
    config = Config(model=ModelConfig(model_name_or_path="nowhere"))
    with pytest.raises(ConfigError, match="device, num_slots: given beside config"):
        layerferry.load("nowhere", config=config, device="cpu", num_slots=2)
