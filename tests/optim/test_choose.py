"""Names of configurations become optimizers: rule, bits of the moments, bits of the master; what is unknown is named."""

from __future__ import annotations

import pytest

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError
from layerferry.interop.keys import table
from layerferry.optim.adafactor import Adafactor
from layerferry.optim.adamw import AdamW
from layerferry.optim.choose import NAMES, chosen, optimizer_for
from layerferry.optim.formats import StateFormat
from layerferry.optim.lion import Lion
from layerferry.optim.sgd import SGD


@pytest.mark.parametrize(
    ("settings", "kind", "master", "moments"),
    [
        ({}, AdamW, "fp32", "fp32"),
        ({"optim": "adamw_torch"}, AdamW, "fp32", "fp32"),
        ({"optim": "paged_adamw_32bit"}, AdamW, "fp32", "fp32"),
        ({"optim": "adamw_8bit"}, AdamW, "24bit", "8bit"),
        ({"optim": "adamw_bnb_8bit", "master_weights": "fp32"}, AdamW, "fp32", "8bit"),
        ({"optim": "paged_adamw_8bit", "master_weights": "bf16"}, AdamW, "bf16", "8bit"),
        ({"master_weights": "bf16"}, AdamW, "bf16", "fp32"),
        ({"optim": "lion_32bit"}, Lion, "fp32", "fp32"),
        ({"optim": "paged_lion_8bit"}, Lion, "24bit", "8bit"),
        ({"optim": "sgd", "momentum": 0.9}, SGD, "fp32", "fp32"),
        ({"optim": "adafactor", "master_weights": "24bit"}, Adafactor, "24bit", "fp32"),
    ],
)
def test_a_name_is_a_rule_and_a_format(settings: dict[str, object], kind: type, master: str, moments: str) -> None:
    config = OptimConfig(weight_decay=0.25, **settings)  # type: ignore[arg-type]
    optimizer = optimizer_for(config)
    assert type(optimizer) is kind
    assert isinstance(optimizer, AdamW | Lion | SGD | Adafactor)
    assert optimizer.format == StateFormat(master=master, moments=moments) == chosen(config)[1]
    assert optimizer.weight_decay == 0.25


def test_the_numbers_of_the_configuration_arrive() -> None:
    adamw = optimizer_for(OptimConfig(adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6))
    lion = optimizer_for(OptimConfig(optim="lion", adam_beta1=0.8, adam_beta2=0.95))
    sgd = optimizer_for(OptimConfig(optim="sgd", momentum=0.7))
    assert isinstance(adamw, AdamW) and isinstance(lion, Lion) and isinstance(sgd, SGD)
    assert (adamw.betas, adamw.eps, lion.betas, sgd.momentum) == ((0.8, 0.95), 1e-6, (0.8, 0.95), 0.7)


def test_every_name_of_the_key_table_is_known_and_no_other() -> None:
    assert set(table()["optim"].accepts) == set(NAMES)
    with pytest.raises(ConfigError, match="optim: 'adagrad' is not supported: adamw_torch"):
        optimizer_for(OptimConfig(optim="adagrad"))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"optim": "sgd", "momentum": 1.0}, "optim_args"),
        ({"optim": "sgd", "weight_decay": -1.0}, "weight_decay"),
        ({"optim": "lion", "adam_beta2": 1.0}, "adam_beta2"),
        ({"optim": "adafactor", "weight_decay": -1.0}, "weight_decay"),
        ({"master_weights": "int8"}, "master_weights"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        optimizer_for(OptimConfig(**settings))  # type: ignore[arg-type]
