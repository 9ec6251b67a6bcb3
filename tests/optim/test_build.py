"""Building the native library: names, damage, staleness, concurrency, and an installation without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layerferry.optim import build
from layerferry.optim.native_kernels import NativeKernels
from tests.optim import quick


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    quick.compile_quickly(monkeypatch)


@pytest.mark.usefixtures("quickly")
def test_the_library_is_named_by_key_and_content(tmp_path: Path) -> None:
    library = build.compile_native(tmp_path)
    assert build.intact_libraries(tmp_path, build.source_key()) == [library]
    assert [path.name for path in tmp_path.iterdir()] == [library.name], "scratch files stay behind"
    NativeKernels(library)


@pytest.mark.usefixtures("quickly")
def test_damaged_libraries_are_not_opened(tmp_path: Path) -> None:
    library = build.compile_native(tmp_path)
    whole = library.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:5000] + b"\xff" + whole[5001:]):
        library.write_bytes(damaged)
        assert build.intact_libraries(tmp_path, build.source_key()) == []


@pytest.mark.usefixtures("quickly")
def test_a_library_from_another_source_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.compile_native(tmp_path)
    for name in ("adamw.cpp", "common.h"):
        folder = tmp_path / name
        shutil.copytree(build.SOURCE_FOLDER, folder)
        with (folder / name).open("a") as file:
            file.write("// one more line\n")
        with monkeypatch.context() as patch:
            patch.setattr(build, "SOURCE_FOLDER", folder)
            assert build.intact_libraries(tmp_path, build.source_key()) == []


def test_the_cache_key_tells_compilers_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other-c++"
    other.write_text("#!/bin/sh\necho other 1.0\n")
    other.chmod(0o755)
    key = build.cache_key()
    monkeypatch.setenv("CXX", str(other))
    assert build.cache_key() != key


def test_an_installation_without_torch_can_compile(tmp_path: Path) -> None:
    """``setup.py`` calls this in a build environment that has setuptools only."""
    program = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; "
        "from layerferry.optim.build import compile_native; print(compile_native(Path(sys.argv[1])))"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    NativeKernels(Path(result.stdout.strip()))


@pytest.mark.usefixtures("quickly")
def test_processes_that_build_at_once_do_not_harm_each_other(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from layerferry.optim import build; "
        f"build.BASE_FLAGS, build.FLAG_SETS = {quick.BASE_FLAGS!r}, {quick.FLAG_SETS!r}; "
        "build.compile_native(Path(sys.argv[1]))"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    libraries = build.intact_libraries(tmp_path, build.source_key())
    assert libraries and len(libraries) == len(list(tmp_path.iterdir()))


@pytest.mark.usefixtures("quickly")
def test_a_failing_compiler_is_passed_over_for_one_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false -an -argument")
    NativeKernels(build.compile_native(tmp_path))


def test_the_reason_of_a_failure_is_the_compilers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int x = not_declared_anywhere;\n")
    monkeypatch.setattr(build, "SOURCE_FOLDER", tmp_path)
    with pytest.raises(build.BuildError, match="not_declared_anywhere"):
        build.compile_native(tmp_path)
    assert list(tmp_path.iterdir()) == [broken]
