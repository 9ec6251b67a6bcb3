"""Which kernels are used: cached, rebuilt when damaged, refused when wrong, torch when nothing builds; one warning."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layerferry.layout import GRAD_PLANE, RESIDUE_PLANE, WEIGHT_PLANE, Layout, ParameterSpec, Plane
from layerferry.optim import build, load
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import StepHyper
from layerferry.optim.native_kernels import NativeKernels
from layerferry.optim.reference import ReferenceKernels
from tests.optim.quick import compile_quickly


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, no prebuilt library, and nothing remembered before or after."""
    compile_quickly(monkeypatch)
    prebuilt = tmp_path / "prebuilt"
    prebuilt.mkdir()
    monkeypatch.setattr(load, "NATIVE_FOLDER", prebuilt)
    monkeypatch.setenv("LAYERFERRY_CACHE", str(tmp_path / "cache"))
    load.load_kernels.cache_clear()
    yield tmp_path / "cache" / "native"
    load.load_kernels.cache_clear()


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_native(*_: object, **__: object) -> Path:
        raise AssertionError("compiled although a library was there")

    monkeypatch.setattr(load, "compile_native", compile_native)


def changed_sources(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    """From now on libraries are built from sources with ``new`` in the place of ``old``."""
    folder = cache.parent.parent / "changed"
    if not folder.exists():
        shutil.copytree(build.SOURCE_FOLDER, folder)
    source = (folder / name).read_text()
    assert old in source
    (folder / name).write_text(source.replace(old, new))
    monkeypatch.setattr(build, "SOURCE_FOLDER", folder)


def train(steps: int = 3) -> torch.Tensor:
    layout = Layout.of([ParameterSpec(name="weight", shape=(500,), dtype=torch.bfloat16)])
    optimizer = AdamW(weight_decay=0.1)
    specs = {"weight": WEIGHT_PLANE, "residue": RESIDUE_PLANE, "grad": GRAD_PLANE, **optimizer.state_planes}
    planes = {name: Plane(layout, spec, torch.zeros(layout.bytes(spec), dtype=torch.uint8)) for name, spec in specs.items()}
    planes["grad"].views()[0].copy_(torch.linspace(-1, 1, 500))
    for step in range(1, steps + 1):
        optimizer.step(planes, layout, StepHyper(lr=1e-3, step=step), threads=2)
    return planes["weight"].buffer


@pytest.mark.parametrize("min_per_thread", ["1 << 14", "64"])
def test_the_sources_as_they_are_pass(cache: Path, monkeypatch: pytest.MonkeyPatch, min_per_thread: str) -> None:
    """However many threads have a part; what is refused below is refused for what was changed."""
    assert load.FOR_TWO_THREADS == 1 << 14
    changed_sources(cache, monkeypatch, "common.h", "kMinPerThread = 1 << 14", f"kMinPerThread = {min_per_thread}")
    assert isinstance(load.load_kernels(), NativeKernels)


def test_built_once_then_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load.load_kernels(), NativeKernels)
    load.load_kernels.cache_clear()
    forbid_compiling(monkeypatch)
    assert isinstance(load.load_kernels(), NativeKernels)


def test_a_prebuilt_library_needs_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.compile_native(cache.parent.parent / "prebuilt")
    monkeypatch.setenv("PATH", "")
    forbid_compiling(monkeypatch)
    assert isinstance(load.load_kernels(), NativeKernels)
    assert not cache.exists()


def test_a_truncated_library_is_built_anew(cache: Path) -> None:
    cache.mkdir(parents=True)
    library = build.compile_native(cache, key=build.cache_key())
    whole = library.read_bytes()
    library.write_bytes(whole[:1000])
    assert isinstance(load.load_kernels(), NativeKernels)
    assert [path.stat().st_size for path in cache.iterdir()] == [len(whole)]


def test_no_compiler_trains_in_torch_with_one_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = train()
    load.load_kernels.cache_clear()
    monkeypatch.setenv("LAYERFERRY_CACHE", str(cache.parent / "another"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load.load_kernels(), ReferenceKernels)
        assert torch.equal(train(), wanted), "the same bits without the kernels"
        train()
    assert len(caplog.records) == 1 and "no C++ compiler" in caplog.text


def test_a_failing_build_trains_in_torch_with_one_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (cache.parent.parent / "broken.cpp").write_text("#error out of order\n")
    monkeypatch.setattr(build, "SOURCE_FOLDER", cache.parent.parent)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load.load_kernels(), ReferenceKernels)
        train()
    assert len(caplog.records) == 1 and "out of order" in caplog.text


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("adamw.cpp", "std::sqrt(v) *", "std::sqrt(v) * 1.0000002f *"),
        ("common.h", "(bits + 0x8000u) >> 16", "(bits + 0x7fffu) >> 16"),
        ("adamw.cpp", "s.decay * master)", "s.decay)"),
        ("common.h", "member + 1 == members ? count :", "member + 1 == members ? count - 1 :"),
        ("adamw.cpp", 'extern "C" {', "namespace hidden {"),
        ("masters.h", "x *= 0x735a2d97u", "x *= 0x735a2d95u"),
        ("masters.h", "(random >> 4) & 0xffu", "(random >> 5) & 0xffu"),
        ("adafactor.cpp", "sum = sum + tree<kTileNumbers>", "sum = tree<kTileNumbers>"),
        ("adafactor.cpp", "row / f.height * f.width", "0"),
        ("adafactor.cpp", "(step + s.master[i] * decay)", "step - s.master[i] * decay"),
        ("adafactor.cpp", "s.random + lane", "s.random"),
        ("adafactor.cpp", "#pragma omp for schedule(dynamic, 1)", ""),
        ("adafactor.cpp", "kTileColumns = 128", "kTileColumns = 64"),
        ("adafactor.cpp", "kTileColumns = 128", "kTileColumns = 256"),
        ("adafactor.cpp", "second = second + tree", "second = tree"),
        ("formats.cpp", "bits ? positive : 0", "positive"),
        ("formats.cpp", "kSignedOctaves = 16", "kSignedOctaves = 15"),
        ("formats.cpp", "step + decay", "step - decay"),
        ("formats.cpp", "momentum * b.first[i] + b.grad[i]", "momentum * b.first[i] - b.grad[i]"),
    ],
)
def test_a_library_that_computes_wrongly_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, right: str, wrong: str
) -> None:
    changed_sources(cache, monkeypatch, name, right, wrong)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load.load_kernels(), ReferenceKernels)
    assert len(caplog.records) == 1 and "reference" in caplog.text


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache.parent.parent / "a-file"
    file.write_text("")
    monkeypatch.setenv("LAYERFERRY_CACHE", str(file / "below"))
    assert isinstance(load.load_kernels(), NativeKernels)
    assert torch.isfinite(train().view(torch.bfloat16).float()).all()
