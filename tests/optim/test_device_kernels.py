"""Updates @device where Triton's launcher cannot be built: plain torch's bits, one line; other failures are not swallowed.

What Triton itself computes is checked on a GPU (``tests/gpu``); here its kernels are ones that fail as it does.
"""

from __future__ import annotations

import logging
import subprocess
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from layerferry.layout import GRAD, WEIGHT, Plane
from layerferry.optim import device_factored, device_kernels
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import StepHyper
from layerferry.optim.device_kernels import TritonKernels
from layerferry.optim.formats import StateFormat
from layerferry.optim.kernels import Kernels
from layerferry.optim.reference import ReferenceKernels
from layerferry.store.store import plane_specs
from tests.optim.arrays import assert_same_bits, ordinary
from tests.optim.test_adafactor import ODD_LAYOUT
from tests.optim.test_adafactor import stepped as factored_steps

NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
NO_HEADERS = subprocess.CalledProcessError(1, ["gcc", "main.c"])


class Failing:
    """A kernel that can be launched with any grid and arguments."""

    def __init__(self, error: Exception) -> None:
        self.error, self.launches = error, 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*_: Any, **__: Any) -> NoReturn:
            self.launches += 1
            raise self.error

        return launch


class Launched:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


def stepped(kernels: Kernels, state: StateFormat) -> dict[str, torch.Tensor]:
    optimizer = AdamW(state_format=state, kernels=kernels)
    specs = plane_specs(optimizer.state_planes)
    planes = {
        kind: Plane(ODD_LAYOUT, spec, torch.zeros(ODD_LAYOUT.bytes(spec), dtype=torch.uint8)) for kind, spec in specs.items()
    }
    for number, entry in enumerate(ODD_LAYOUT.entries):
        arrays = ordinary(entry.numel, number)
        planes[WEIGHT].view(entry).copy_(arrays["master"].view(entry.shape))
        planes[GRAD].view(entry).copy_(arrays["grad"].view(entry.shape))
    for step in (1, 2):
        optimizer.step(planes, ODD_LAYOUT, StepHyper(lr=1e-3, step=step, grad_scale=0.5), threads=1)
    return {f"{kind} {dtype}": values for kind, plane in planes.items() for dtype, values in plane.sections.items()}


@pytest.mark.parametrize(
    "state", [StateFormat(), StateFormat(master="24bit", moments="8bit")], ids=["fp32 moments", "8-bit moments"]
)
@pytest.mark.parametrize("error", [NO_COMPILER, NO_HEADERS], ids=["no compiler", "no headers"])
def test_torch_serves_where_nothing_can_be_built(
    state: StateFormat, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(error)
    monkeypatch.setattr(device_kernels, "_kernels", lambda: dict.fromkeys(("split", "fp32", "update"), failing))
    with caplog.at_level(logging.WARNING):
        found = stepped(TritonKernels(), state)
    assert_same_bits(found, stepped(ReferenceKernels(), state))
    assert failing.launches == 1 and len(caplog.records) == 1 and str(error) in caplog.text


def test_torch_serves_adafactor_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(NO_COMPILER)
    monkeypatch.setattr(device_factored, "_kernels", lambda: SimpleNamespace(sums_by_column=failing))
    with caplog.at_level(logging.WARNING):
        found = factored_steps(TritonKernels(), ordinary, "24bit")
    assert_same_bits(found, factored_steps(ReferenceKernels(), ordinary, "24bit"))
    assert failing.launches == 1 and len(caplog.records) == 1


@pytest.mark.parametrize("last", ["take_rows", "take_columns", "clipped", "subtract"])
def test_adafactor_ends_where_its_moments_have_changed(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference would step them once more."""
    kernels: dict[str, Any] = dict.fromkeys(("sums_by_column", "sums_by_row", "take_rows", "take_columns", "clipped"), Launched())
    monkeypatch.setattr(device_factored, "_kernels", lambda: SimpleNamespace(**{**kernels, last: Failing(NO_COMPILER)}))
    with pytest.raises(RuntimeError, match="C compiler"):
        factored_steps(TritonKernels(), ordinary, "24bit")


def test_other_failures_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(device_kernels, "_kernels", lambda: dict.fromkeys(("split", "fp32", "update"), failing))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        stepped(TritonKernels(), StateFormat())
