"""``plan``: from a folder with a config.json to a table and a JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from layerferry.config import Config, EngineConfig, ModelConfig, Pins, TrainConfig
from layerferry.plan import Plan
from layerferry.planner import plan_for
from layerferry.planner.report import _choices, _kept_pins, render
from tests.planner.subjects import TINY, qwen


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYERFERRY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY}))
    return tmp_path


def run(folder: Path, **engine: int) -> Config:
    return Config(
        model=ModelConfig(model_name_or_path=str(folder)),
        train=TrainConfig(per_device_train_batch_size=2),
        engine=EngineConfig(device="cpu", **engine),
    )


def test_a_config_without_weights_is_enough(folder: Path) -> None:
    report = plan_for(run(folder, num_slots=2))
    assert report.fits and report.shortfall() == ""
    text = report.render()
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "llama" in text and "B/param" in text and "limits the step" in text and "fits" not in text
    (slots,) = [line for line in text.splitlines() if line.strip().startswith("num_slots")]
    assert "pinned" in slots
    assert render(report.plan, report.question) == text
    found = json.loads(json.dumps(report.to_dict()))
    assert found["fits"] is True and found["pinned"] == ["num_slots"]
    assert found["model"]["bytes_per_param"] == pytest.approx(14, rel=0.05)
    assert found["plan"]["seconds"]["limit"] in ("compute", "upload", "download", "optimizer")


def test_what_is_kept_and_travels_is_said_of_the_plan_as_it_is() -> None:
    model, pins = qwen("qwen2.5-7b"), Pins(num_waves=99)
    for plan, said in (
        (Plan(), "keep everything"),
        (Plan(mlp_chunk_tokens=64), "of a layer that is computed again, as every one is"),
        (Plan(num_slots=28), "every layer travels up once a step, every gradient down once"),
        (Plan(num_slots=3), "every weight travels up twice a step, every gradient down once"),
        (Plan(num_waves=4, on_device=tuple(range(30))), "every unit lives @device: nothing travels"),
        (Plan(num_waves=4, on_device=tuple(range(29))), "gradients are carried between waves in bf16"),
    ):
        assert said in _choices(plan, pins, model)
    assert _kept_pins(pins, Plan(num_waves=4)) == [] and _kept_pins(pins, Plan(num_waves=99)) == ["num_waves"]


def test_what_does_not_fit_is_shown_and_said(folder: Path) -> None:
    report = plan_for(run(folder, host_memory=1000))
    assert not report.fits and "MiB short" in report.shortfall()
    assert report.render().endswith(f"does not fit: {report.shortfall()}")
    assert report.to_dict()["fits"] is False


def test_the_packages_names_are_what_they_say() -> None:
    import layerferry.planner as planner

    assert all(not isinstance(getattr(planner, name), ModuleType) for name in planner.__all__)
