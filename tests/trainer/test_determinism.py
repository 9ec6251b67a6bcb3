"""``full_determinism`` reaches torch for the length of a run, and changes no bit on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.trainer import loop, train
from layerferry.trainer.determinism import deterministic_kernels
from tests.reliability.runs import assert_same_folder, make_config, prepare


def test_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_kernels():
        import os

        assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = loop.Loop.state

    def state(self: loop.Loop) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return real(self)

    base = prepare(tmp_path)
    monkeypatch.setattr(loop.Loop, "state", state)
    for name, deterministic in (("plain", False), ("fixed", True)):
        train(make_config(base, base / name, max_steps=2, full_determinism=deterministic))
    assert seen == [False, False, True, True]
    assert_same_folder(base / "fixed", base / "plain")
