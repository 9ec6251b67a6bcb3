"""The native kernels of this process, and one library for each level of the CPU."""

from __future__ import annotations

import subprocess

import pytest
import torch

from layerferry.optim import build
from layerferry.optim.load import load_kernels
from layerferry.optim.native_kernels import NativeKernels

LEVELS = {"AVX512": ("x86-64", "x86-64-v3", "x86-64-v4"), "AVX2": ("x86-64", "x86-64-v3")}


@pytest.fixture(scope="session")
def native() -> NativeKernels:
    kernels = load_kernels()
    assert isinstance(kernels, NativeKernels), "these tests need a C++ compiler"
    return kernels


@pytest.fixture(scope="session")
def clones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NativeKernels]:
    """The sources built for one level at a time, for each level that this CPU can run."""
    folder = tmp_path_factory.mktemp("clones")
    built = {}
    for level in LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("native",)):
        library = folder / f"{level}.so"
        flags = [*build.BASE_FLAGS, "-fopenmp", "-DLAYERFERRY_NO_CLONES", f"-march={level}"]
        subprocess.run(["c++", *flags, "-o", str(library), *map(str, build.sources())], check=True)
        built[level] = NativeKernels(library)
    return built
