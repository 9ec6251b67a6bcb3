"""The key table against LLaMA-Factory's own list of keys, against our Config, and against the page made from it."""

import dataclasses
from pathlib import Path

import pytest

from layerferry import config
from layerferry.interop.keys import GROUPS, HARMLESS, HONOURED, NESTED_SCHEMA, REFUSED, REPLACED, markdown, table
from layerferry.interop.values import convert

HERE = Path(__file__).parent
SECTIONS = {
    "model": config.ModelConfig,
    "data": config.DataConfig,
    "optim": config.OptimConfig,
    "train": config.TrainConfig,
    "engine": config.EngineConfig,
    "chat": config.ChatConfig,
    "export": config.ExportConfig,
}
COMBINED = {"bf16", "fp32", "use_cpu", "disable_gradient_checkpointing", "infer_backend", "use_muon"}
"""Honoured by the reader, together with other keys, not by one field."""
DIFFERENT = {
    "do_train": "a run without it would do nothing",
    "output_dir": "LLaMA-Factory's own default comes from transformers",
    "finetuning_type": "lora is not supported, so the reader asks for the key",
}
"""Our default is another, and why."""


def llamafactory_keys() -> list[list[str]]:
    lines = (HERE / "llamafactory_0_9_5_keys.txt").read_text(encoding="utf-8").splitlines()
    return [line.split(" ", 2) for line in lines if not line.startswith("#")]


def test_every_key_of_llamafactory_has_a_status_and_its_default() -> None:
    keys = llamafactory_keys()
    assert len(keys) == 343
    for _, name, default in keys:
        assert table()[name].status in (HONOURED, REPLACED, HARMLESS, REFUSED), name
        assert table()[name].default == default, name


def test_honoured_keys_have_a_field_of_the_configuration_and_the_same_default() -> None:
    for key in table().values():
        if key.status != HONOURED or key.key in COMBINED or key.alias_of:
            continue
        section, field = key.field.split(".")
        fields = {item.name: item for item in dataclasses.fields(SECTIONS[section])}
        assert field in fields, key.key
        if key.key in DIFFERENT or fields[field].default is dataclasses.MISSING:
            continue
        default = fields[field].default
        if key.default in ("null", "none"):
            assert not default, key.key
        elif key.type != "any":
            assert default == convert(key, key.default), key.key


def test_every_field_of_the_configuration_can_be_set_by_a_key() -> None:
    fields = {key.field for key in table().values() if key.status == HONOURED}
    by_reader = {"train.fp32", "train.gradient_checkpointing", "chat.template", "chat.default_system", "chat.enable_thinking"}
    by_reader |= {"export.infer_dtype", "export.template", "chat.model", "export.model"}
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            assert f"{section}.{field.name}" in fields | by_reader, f"{section}.{field.name}"


@pytest.mark.parametrize("status", [REPLACED, REFUSED, HARMLESS])
def test_what_is_not_honoured_says_why(status: str) -> None:
    assert all(key.note and not key.field for key in table().values() if key.status == status)


def test_aliases_point_to_keys_that_are_none() -> None:
    aliases = [key for key in table().values() if key.alias_of]
    assert {key.key for key in aliases} == {
        "evaluation_strategy",
        "per_gpu_train_batch_size",
        "per_gpu_eval_batch_size",
        "no_cuda",
    }
    assert all(table()[str(key.alias_of)].alias_of is None for key in aliases)


def test_groups_and_nested_schema() -> None:
    assert {key.group for key in table().values()} == set(GROUPS)
    assert not NESTED_SCHEMA & set(table())


def test_the_page_is_current() -> None:
    page = HERE.parents[1] / "docs" / "llamafactory-keys.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run make docs"
