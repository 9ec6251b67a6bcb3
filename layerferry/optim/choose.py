"""From the words of a configuration file to an optimizer: Hugging Face's names of ``optim``, and our own key for the master.

A name says the rule and the bits of its moments (``paged_`` says where they live, which is the plan's affair here). The master
follows: fp32 beside fp32 moments, 24 bits beside 8-bit ones, unless ``master_weights`` says otherwise.
Checked by ``tests/optim/test_choose.py``.
"""

from __future__ import annotations

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError
from layerferry.optim.adafactor import Adafactor
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import Optimizer
from layerferry.optim.formats import StateFormat
from layerferry.optim.lion import Lion
from layerferry.optim.muon import Muon
from layerferry.optim.sgd import SGD

NAMES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("AdamW", "fp32")),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw_32bit"), ("AdamW", "fp32")),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), ("AdamW", "8bit")),
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion_32bit"), ("Lion", "fp32")),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), ("Lion", "8bit")),
    "muon": ("Muon", "fp32"),
    "muon_8bit": ("Muon", "8bit"),
    "sgd": ("SGD", "fp32"),
    "adafactor": ("Adafactor", "fp32"),
}
"""``optim`` → rule, and bits of the moments."""

MASTERS = {"fp32": "fp32", "8bit": "24bit"}
"""Of ``master_weights: auto``, by the bits of the moments."""


def chosen(config: OptimConfig) -> tuple[str, StateFormat]:
    """Rule and format that ``config`` names."""
    if config.optim not in NAMES:
        raise ConfigError(f"optim: {config.optim!r} is not supported: {', '.join(NAMES)}")
    rule, moments = NAMES[config.optim]
    master = MASTERS[moments] if config.master_weights == "auto" else config.master_weights
    return rule, StateFormat(master=master, moments=moments)


def optimizer_for(config: OptimConfig, *, seed: int = 0) -> Optimizer:
    """The optimizer that ``config`` names; ``seed`` of its stochastic rounding."""
    rule, state_format = chosen(config)
    if rule == "Lion":
        return Lion.of(config, state_format=state_format, seed=seed)
    if rule == "Adafactor":
        return Adafactor.of(config, state_format=state_format, seed=seed)
    if rule == "Muon":
        return Muon.of(config, state_format=state_format, seed=seed)
    if rule == "SGD":
        return SGD.of(config, state_format=state_format, seed=seed)
    return AdamW.of(config, state_format=state_format, seed=seed)
