"""The machine as a value, its cache of rates, and the probe's path on a machine without a device."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from layerferry.backends.cpu import CpuBackend
from layerferry.backends.cuda import CudaBackend
from layerferry.config import EngineConfig
from layerferry.planner import measure, probe
from layerferry.planner.host import host_limits
from layerferry.planner.machine import RATES, cpu_name, default_rates, machine_for, rates_file, read_rates


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYERFERRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cpu_that_was_never_probed_is_timed_in_brief() -> None:
    found = machine_for(EngineConfig(device="cpu"), CpuBackend())
    assert found.is_cpu and not found.guessed
    assert all(getattr(found, name).source == "measured in brief" and getattr(found, name).value > 0 for name in RATES)
    assert found.host_available == pytest.approx(host_limits()[0].num_bytes, rel=0.2)


def test_overrides_replace_what_the_system_says() -> None:
    found = machine_for(EngineConfig(host_memory=5, device_memory=7), CpuBackend())
    assert (found.host_available, found.host_source) == (5, "host_memory")
    assert found.host_free == pytest.approx(host_limits()[0].num_bytes, rel=0.2), "but that is known"
    assert (found.device_available, found.device_source) == (7, "device_memory")


def test_defaults_name_their_device() -> None:
    assert default_rates("NVIDIA H200", on_cpu=False)["matmul_flops_per_s"].source == "default for H200"
    assert default_rates("NVIDIA H100 80GB HBM3", on_cpu=False)["matmul_flops_per_s"].source == "guess"
    assert default_rates("an unknown device", on_cpu=False)["upload_bytes_per_s"].value > 0


def test_a_probe_is_remembered_for_this_machine() -> None:
    found = probe(EngineConfig(device="cpu"), quick=True)
    assert all(getattr(found, name).source == "measured" and getattr(found, name).value > 0 for name in RATES)
    assert "no CUDA device" in " ".join(found.notes)
    again = machine_for(EngineConfig(device="cpu"), CpuBackend())
    assert again.matmul_flops_per_s.source == "measured"
    assert again.optimizer_s_per_param.value == found.optimizer_s_per_param.value
    assert json.loads(json.dumps(found.to_dict()))["rates"]["dram_bytes_per_s"]["source"] == "measured"
    text = found.render()
    assert max(len(line) for line in text.splitlines()) <= 100 and "ns per parameter" in text


def test_what_cannot_be_measured_keeps_its_default_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(side: int) -> float:
        raise RuntimeError("no luck")

    monkeypatch.setattr(measure, "matmul_flops_per_s", fails)
    found = probe(EngineConfig(device="cpu"), quick=True)
    assert found.matmul_flops_per_s.source == "guess"
    assert any("matrix products not measured (no luck)" in note for note in found.notes)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"matmul_flops_per_s": "much"}', "[" * 100_000, '{"a": 1' + "0" * 400 + "}"]
)
def test_a_damaged_cache_is_no_cache(content: str) -> None:
    path = rates_file("some device")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert read_rates("some device") is None


def test_a_cache_without_end_is_no_cache() -> None:
    path = rates_file("some device")
    path.parent.mkdir(parents=True)
    for rate, known in ((1e9, True), (math.inf, False), (math.nan, False), (0.0, False)):
        path.write_text(json.dumps(dict.fromkeys(RATES, rate)))
        assert (read_rates("some device") is not None) is known


def test_a_cpu_has_a_name_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "info").write_text("processor : 0\nmodel name : A fine CPU\n")
    assert cpu_name(tmp_path / "info") == "A fine CPU"
    assert cpu_name(tmp_path / "none")


class Integrated(CudaBackend):
    """A device that nobody has measured before, without a device."""

    def __init__(self, *, unified: bool) -> None:
        self.device, self._unified = torch.device("cuda", 0), unified

    is_unified = property(lambda self: self._unified)  # type: ignore[assignment]

    def describe(self) -> str:
        return "NVIDIA GH200 480GB"

    def memory(self) -> tuple[int, int]:
        return 90 << 30, 96 << 30

    def allocated_bytes(self) -> int:
        return 0

    def matmul_flops_per_s(self, rows: int = 1, inner: int = 1, columns: int = 1) -> float:
        return 6e14

    def link_bytes_per_s(self, num_bytes: int = 1) -> tuple[float, float]:
        return 400e9, 380e9

    def links_together_bytes_per_s(self, num_bytes: int = 1) -> tuple[float, float]:
        return 300e9, 290e9

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def copy(self, lane: object, target: object, source: object) -> None:
        return None

    def synchronize(self) -> None:
        return None


@pytest.mark.parametrize("unified", [False, True])
def test_a_device_is_what_it_measures_not_what_it_is_called(unified: bool) -> None:
    """A coherent link shows in its rate: a GH200 is no H200, and gets none of its numbers."""
    found = machine_for(EngineConfig(), Integrated(unified=unified))
    assert found.upload_bytes_per_s.value == 400e9 and found.download_together_bytes_per_s.value == 290e9
    assert all(getattr(found, name).source == "measured in brief" for name in RATES)
    assert (found.unified, found.one_memory, found.is_cpu) == (unified, unified, False)
    assert ("the same memory" in found.render()) == unified


def test_a_device_too_full_to_be_measured_keeps_stated_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, num_bytes: int = 1) -> tuple[float, float]:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Integrated, "link_bytes_per_s", full)
    found = machine_for(EngineConfig(), Integrated(unified=False))
    assert found.guessed and found.upload_bytes_per_s.value > 0
