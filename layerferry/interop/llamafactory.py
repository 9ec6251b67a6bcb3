"""A LLaMA-Factory configuration file, as users have it, becomes a ``Config``; what is not honoured is said or refused.

``keys.tsv`` says what happens to each key; this file holds only what takes more than one key or more than a conversion: how the
precision keys combine, what excludes what, and other names of the same thing. Every complaint is one ``ConfigError`` that names
the file, line and key. What is replaced goes to the log, one line a key; silence means honoured, or without effect.
Checked by ``tests/interop/test_llamafactory.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from layerferry.config import (
    RESUME_NEVER,
    RESUME_NEWEST,
    ChatConfig,
    Config,
    DataConfig,
    EngineConfig,
    ExportConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    extra_keys_allowed,
)
from layerferry.errors import ConfigError
from layerferry.interop.checks import check
from layerferry.interop.keys import NESTED_SCHEMA, REFUSED, REPLACED, Key, table
from layerferry.interop.sources import Setting, read_settings
from layerferry.interop.values import convert, to_bool, to_float, to_str

log = logging.getLogger(__name__)

TRACKERS = ("tensorboard", "wandb")
MUON = ("muon", "muon_8bit")
"""Values of ``optim`` that ``use_muon`` goes with; the first one is what it means."""


class Reading:
    """Settings that passed the table: typed values by key, where each stands, and the lines that the user should see."""

    def __init__(self, path: Path | None, overrides: Sequence[str]) -> None:
        self.values: dict[str, Any] = {}
        self.where: dict[str, str] = {}
        self.notices: list[str] = []
        self.source = str(path) if path is not None else "command line"
        for name, setting in read_settings(path, overrides).items():
            key = self._known(name, setting)
            if key is not None:
                self._take(key, setting)

    def fail(self, key: str, message: str) -> ConfigError:
        """The error to raise about ``key``."""
        return ConfigError(f"{self.where.get(key, self.source)}: {key}: {message}")

    def section(self, name: str) -> dict[str, Any]:
        """Values of the keys whose field lies in section ``name`` of the configuration, by field."""
        by_field = {table()[key].field: value for key, value in self.values.items()}
        return {field.removeprefix(f"{name}."): value for field, value in by_field.items() if field.startswith(f"{name}.")}

    def model(self) -> ModelConfig:
        if not self.values.get("model_name_or_path"):
            raise self.fail("model_name_or_path", "missing: a folder with config.json, or a hub id")
        return ModelConfig(**self.section("model"))

    def _known(self, name: str, setting: Setting) -> Key | None:
        key = table().get(name)
        if key is not None and key.alias_of is not None:
            return table()[key.alias_of]
        if key is not None:
            return key
        if name in NESTED_SCHEMA:
            hint = "belongs to LLaMA-Factory's nested v1 schema, which is not supported: use the flat keys"
        else:
            close = get_close_matches(name, table(), n=1)
            hint = "unknown key" + (f": did you mean {close[0]!r}?" if close else "")
            if extra_keys_allowed():
                self.notices.append(f"{setting.where}: {name}: {hint} (ignored, ALLOW_EXTRA_ARGS is set)")
                return None
        raise ConfigError(f"{setting.where}: {name}: {hint}")

    def _take(self, key: Key, setting: Setting) -> None:
        if key.key in self.where:
            raise ConfigError(f"{setting.where}: {key.key} is set twice: under another name at {self.where[key.key]}")
        self.where[key.key] = setting.where
        if setting.value is None:
            if key.type.endswith("?") and key.default not in ("null", "none"):
                self.values[key.key] = None  # where null is a choice of its own (enable_thinking)
            return
        try:
            value = convert(key, setting.value)
        except ValueError as error:
            is_secret = key.key.endswith("_token")
            raise self.fail(key.key, "expected text, found something else" if is_secret else str(error)) from None
        if key.status in (REFUSED, REPLACED) and not _is_default(key, value):
            if key.status == REFUSED:
                raise self.fail(key.key, f"{value!r} is not supported: {key.note}")
            self.notices.append(f"{key.key}: {key.note}")
        self.values[key.key] = value


def read_config(path: Path | None, overrides: Sequence[str]) -> Config:
    """The configuration of a training run; what was replaced goes to the log."""
    config, notices = read_with_notices(path, overrides)
    for notice in notices:
        log.info(notice)
    return config


def read_with_notices(path: Path | None, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """``read_config`` for a caller that shows the lines itself."""
    reading = Reading(path, overrides)
    values = reading.values
    if "finetuning_type" not in values:
        raise reading.fail("finetuning_type", "missing, and LLaMA-Factory's default is lora: set finetuning_type: full")
    data, train, engine = reading.section("data"), reading.section("train"), reading.section("engine")
    if values.get("use_cpu"):
        if engine.get("device", "auto") not in ("auto", "cpu"):
            raise reading.fail("use_cpu", f"contradicts device: {engine['device']}")
        engine["device"] = "cpu"
    train["fp32"] = _computes_in_fp32(reading, engine.get("device", "auto"))
    train["gradient_checkpointing"] = not values.get("disable_gradient_checkpointing", False)
    if "resume_from_checkpoint" in train:
        train["resume_from_checkpoint"] = _resume(reading)
    if "include_num_input_tokens_seen" in train:
        train["include_num_input_tokens_seen"] = _counts_tokens(reading)
    if "report_to" in train:
        train["report_to"] = _trackers(reading)
    if "interleave_probs" in data:
        data["interleave_probs"] = _probabilities(reading)
    if "output_dir" in reading.where and not train.get("output_dir"):
        raise reading.fail("output_dir", "empty: name the folder that the results go to")
    for section, name in ((train, "output_dir"), (train, "logging_dir"), (engine, "disk_folder")):  # as transformers does
        if section.get(name):
            section[name] = os.path.expanduser(section[name])
    config = Config(
        model=reading.model(),
        data=DataConfig(**data),
        optim=OptimConfig(**_optim(reading)),
        train=TrainConfig(**train),
        engine=EngineConfig(**engine),
    )
    check(config, reading.fail)
    return config, reading.notices


def chat_options(path: Path | None, overrides: Sequence[str]) -> ChatConfig:
    """The keys that a conversation heeds, from a chat or a training file; a path to a folder is the model."""
    reading = Reading(*_folder_as_model(path, overrides))
    data = reading.section("data")
    shared = {name: data[name] for name in ("template", "default_system", "enable_thinking") if name in data}
    return ChatConfig(model=reading.model(), **shared, **reading.section("chat"))


def export_options(path: Path | None, overrides: Sequence[str]) -> ExportConfig:
    """The keys that an export heeds; a path to a folder is the model."""
    reading = Reading(*_folder_as_model(path, overrides))
    if not reading.values.get("export_dir"):
        raise reading.fail("export_dir", "missing: the folder to write")
    if reading.values.get("rope_scaling"):
        raise reading.fail("rope_scaling", "an export leaves the positions of a model as they are: remove it")
    shared = {name: reading.values[name] for name in ("template", "infer_dtype") if name in reading.values}
    return ExportConfig(model=reading.model(), **shared, **reading.section("export"))


def _folder_as_model(path: Path | None, overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    if path is None or path.suffix.lower() in {".yaml", ".yml", ".json"}:
        return path, list(overrides)
    return None, [f"model_name_or_path={_quoted(str(path))}", *overrides]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''").replace("${", "\\${") + "'"


def _is_default(key: Key, value: Any) -> bool:
    """A value that changes nothing: the default itself, or nothing at all."""
    if isinstance(value, bool):
        return value is (key.default == "true")
    return value in ("", 0, (), {}) or str(value).lower() == key.default.lower()


def _computes_in_fp32(reading: Reading, device: str) -> bool:
    """fp32 compute only where it is asked for: our own key, or bf16 switched off by hand on a CPU."""
    values = reading.values
    if values.get("fp32"):
        if values.get("bf16") or values.get("pure_bf16"):
            raise reading.fail("fp32", "contradicts bf16: set one of them")
        return True
    if values.get("bf16") is False and device == "cpu" and not values.get("pure_bf16"):
        return True
    if not values.get("bf16") and not values.get("pure_bf16"):
        reading.notices.append(
            "bf16: not set: computing in bf16 over an exact fp32 master all the same; fp32: true computes in fp32"
        )
    reading.notices.append("bf16: models are saved in bf16 (LLaMA-Factory without DeepSpeed saves fp32)")
    return False


def _resume(reading: Reading) -> str | None:
    value = reading.values["resume_from_checkpoint"]
    if isinstance(value, bool) or str(value).lower() in {"true", "false"}:
        return RESUME_NEWEST if to_bool(value) else RESUME_NEVER
    try:
        return to_str(value)
    except ValueError as error:
        raise reading.fail("resume_from_checkpoint", str(error)) from None


def _counts_tokens(reading: Reading) -> bool:
    value = reading.values["include_num_input_tokens_seen"]
    if value in ("all", "non_padding"):
        return True
    try:
        return to_bool(value)
    except ValueError:
        raise reading.fail(
            "include_num_input_tokens_seen", f"expected true, false, all or non_padding, found {value!r}"
        ) from None


def _trackers(reading: Reading) -> tuple[str, ...]:
    names = tuple(name.lower() for name in reading.values["report_to"] if name.lower() != "none")
    if names == ("all",):
        return TRACKERS
    for name in names:
        if name not in TRACKERS:
            raise reading.fail("report_to", f"{name!r} is not supported: {', '.join(TRACKERS)}, none")
    return names


def _probabilities(reading: Reading) -> tuple[float, ...]:
    try:
        return tuple(to_float(item) for item in reading.values["interleave_probs"])
    except ValueError as error:
        raise reading.fail("interleave_probs", str(error)) from None


def _optim(reading: Reading) -> dict[str, Any]:
    optim = reading.section("optim")
    if reading.values.get("use_muon") and optim.get("optim") not in MUON:
        if "optim" in optim and not str(optim["optim"]).startswith("adamw_torch"):
            raise reading.fail("use_muon", f"contradicts optim: {optim['optim']}: set one of them")
        optim["optim"] = MUON[0]
    if reading.values.get("optim_args"):
        optim["momentum"] = _momentum(reading, optim.get("optim"))
    for name, value in optim.get("lr_scheduler_kwargs", {}).items():
        if not isinstance(value, int | float | str):
            raise reading.fail("lr_scheduler_kwargs", f"{name}: expected a number or text, found {value!r}")
    return optim


def _momentum(reading: Reading, optim: str | None) -> float:
    """``optim_args``, of which sgd and muon take one."""
    name, _, value = str(reading.values["optim_args"]).replace(" ", "").partition("=")
    if name != "momentum" or optim not in ("sgd", *MUON):
        raise reading.fail("optim_args", "expected momentum=0.9 (or another number below 1) beside optim: sgd or muon")
    try:
        return to_float(value)
    except ValueError as error:
        raise reading.fail("optim_args", str(error)) from None
