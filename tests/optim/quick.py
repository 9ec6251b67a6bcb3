"""Libraries compiled in a fifth of the time, for tests of how they are built, found and refused: not optimised, no clones.

The bits are the same: no optimisation of these flags changes a rounding (``test_load.py`` has the unchanged sources accepted).
The flags of an installation are used by all other tests of kernels, and by ``test_an_installation_without_torch_can_compile``.
"""

from __future__ import annotations

import pytest

from layerferry.optim import build

BASE_FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in build.BASE_FLAGS)
FLAG_SETS = build.FLAG_SETS[1:]


def compile_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BASE_FLAGS", BASE_FLAGS)
    monkeypatch.setattr(build, "FLAG_SETS", FLAG_SETS)
