"""The versions that a bug report needs: read from package metadata, so that asking for them starts nothing.

Checked by ``tests/cli/test_cli.py``.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from layerferry.version import VERSION

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "datasets", "numpy", "omegaconf")


def facts() -> dict[str, str]:
    """Name to version, in the order in which they are shown."""
    found = {"layerferry": VERSION, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
