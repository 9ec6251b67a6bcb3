"""From ``native/adamw.cpp`` to a shared library: at installation into the package, or at first use into the user's cache.

Standard library only: ``setup.py`` calls ``compile_native`` in a build environment without torch. The source is in ``native/``,
beside the package in a checkout and inside it in a wheel. A library's file name carries the key it was built for (source, flags,
and in the cache the compiler) and the digest of its own bytes: a stale, truncated or damaged file is never opened, and
processes that build at the same time write temporary files and rename them, without a lock.
Leaves out: Windows, and compilers that do not take gcc's options. Checked by ``tests/optim/test_build.py``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from layerferry.config import preferred_compiler

_INSTALLED = Path(__file__).resolve().parents[1] / "native"
_CHECKOUT = Path(__file__).resolve().parents[2] / "native"
NATIVE_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
SOURCE_FOLDER = NATIVE_FOLDER
"""Where the C++ files are; all of them make one library."""

BASE_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared")
FLAG_SETS = (("-fopenmp",), ("-fopenmp", "-DLAYERFERRY_NO_CLONES"), ("-DLAYERFERRY_NO_CLONES",))
"""In order of preference: a C library without indirect functions cannot link clones, some compilers lack OpenMP."""

COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 120

log = logging.getLogger(__name__)


class BuildError(Exception):
    """No library came out; the message says why in one line."""


def compile_native(target_dir: Path, *, key: str | None = None) -> Path:
    """Compile into ``target_dir`` and return the library; ``BuildError`` where that cannot be done.

    An installation calls it with the package's own ``native`` folder; ``key`` None: ``source_key()``, which is looked for there.
    """
    failure = "no C++ compiler (looked for $CXX, " + ", ".join(COMPILERS) + ")"
    for compiler in _compilers():
        for flags in FLAG_SETS:
            with tempfile.NamedTemporaryFile(dir=target_dir, prefix=".building-", suffix=".so", delete=False) as file:
                scratch = Path(file.name)
            try:
                error = _run([*compiler, *BASE_FLAGS, *flags, "-o", str(scratch), *map(str, sources()), "-lm"])
                if error is None:
                    if "-fopenmp" not in flags:
                        log.warning("%s has no OpenMP: updates run on one thread", shlex.join(compiler))
                    target = target_dir / f"kernels-{key or source_key()}-{digest(scratch.read_bytes())}.so"
                    scratch.chmod(0o755)
                    os.replace(scratch, target)
                    return target
                failure = f"{shlex.join(compiler)}: {error}"
            finally:
                scratch.unlink(missing_ok=True)
    raise BuildError(failure)


def source_key() -> str:
    """What a prebuilt library must have been built from."""
    return digest(*(path.read_bytes() for path in (*headers(), *sources())), repr((BASE_FLAGS, FLAG_SETS)).encode())


def sources() -> list[Path]:
    """The files that are compiled."""
    return sorted(SOURCE_FOLDER.glob("*.cpp"))


def headers() -> list[Path]:
    return sorted(SOURCE_FOLDER.glob("*.h"))


def cache_key() -> str:
    """What a library in the user's cache must have been built from: source, flags, and the compilers that are there."""
    return digest(source_key().encode(), *(_identity(compiler) for compiler in _compilers()))


def intact_libraries(folder: Path, key: str) -> list[Path]:
    """Libraries for ``key`` whose bytes are those that were written: opening a truncated one would kill the process."""
    return [path for path in sorted(folder.glob(f"kernels-{key}-*.so")) if path.stem.endswith(f"-{digest(path.read_bytes())}")]


def _compilers() -> list[list[str]]:
    """Command lines of the compilers that are there, the preferred one first."""
    preferred = preferred_compiler()
    commands = [shlex.split(preferred)] if preferred else []
    commands += [[name] for name in COMPILERS]
    return [command for command in commands if command and shutil.which(command[0])]


def _identity(compiler: list[str]) -> bytes:
    """What tells one compiler from another: its command, version and target."""
    try:
        result = subprocess.run([*compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return repr(compiler).encode()
    return repr(compiler).encode() + result.stdout + repr(os.uname().machine).encode()


def _run(command: list[str]) -> str | None:
    """None, or the line that says why the command failed."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return None
    lines = [line for line in result.stderr.splitlines() if "error" in line.lower()] or result.stderr.splitlines()
    return lines[0] if lines else f"exit status {result.returncode}"


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
