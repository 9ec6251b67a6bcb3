"""The one build step that setuptools cannot declare: compile the native optimizer kernel into the wheel.

The kernel is a plain shared library (C ABI, no Python or torch headers), so one build serves every Python. Where there is no
compiler, the installation goes on without it: the kernel is then built at first use, or the torch reference takes its place.
The C++ sources travel in the wheel, in ``layerferry/native``, so that a first-use build works from an installed package.
Checked by ``tools/check_wheel.sh``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "native"


class BuildWithKernel(build_py):
    """Adds the native sources, and the compiled kernel where a compiler is present, to what is installed."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # an editable install compiles at first use, from native/ beside the package
        target = Path(self.build_lib) / "layerferry" / "native"
        target.mkdir(parents=True, exist_ok=True)
        for source in sorted(SOURCES.iterdir()):
            if source.suffix in {".cpp", ".h", ".hpp"}:
                shutil.copy2(source, target / source.name)
        try:
            sys.path.insert(0, str(ROOT))
            from layerferry.optim.build import compile_native

            print(f"layerferry: native kernel built: {compile_native(target)}")
        except Exception as error:  # whatever goes wrong here is met again, and reported, at first use
            print(f"layerferry: native kernel not built ({error}); it will be tried again at first use", file=sys.stderr)


class NativeDistribution(Distribution):
    """Holds machine code, though no extension module of Python."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """Any Python 3, but this platform only: the kernel knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=NativeDistribution, cmdclass={"build_py": BuildWithKernel, "bdist_wheel": PlatformWheel})
