"""Random weights where the device is too small for those of a unit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from layerferry.models import initial
from tests.planner.subjects import skeleton


@pytest.mark.parametrize("index", [0, 1])
def test_a_unit_that_the_device_has_no_room_for_is_drawn_on_the_cpu(
    index: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole, also where the device gave out behind some parameters."""
    built, cpu = skeleton("llama"), torch.device("cpu")
    unit, drawn = built.units[index], initial._drawn
    expected = dict(initial.initial_parameters(built, unit, seed=3, device=cpu))

    def small(skeleton: Any, unit: Any, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        values = drawn(skeleton, unit, seed, cpu)
        if device.type == "cpu":
            yield from values
            return
        name, value = next(values)
        yield name, torch.zeros_like(value)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(initial, "_drawn", small)
    with caplog.at_level(logging.WARNING):
        found = dict(initial.initial_parameters(built, unit, seed=3, device=torch.device("cuda")))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert len(caplog.records) == 1 and f"{unit.name}: its " in caplog.text
    monkeypatch.setattr(initial, "_drawn", lambda *_: small(*_[:3], torch.device("cuda")))
    with pytest.raises(torch.OutOfMemoryError):
        dict(initial.initial_parameters(built, unit, seed=3, device=cpu))
