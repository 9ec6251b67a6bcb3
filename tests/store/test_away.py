"""Planes that are not here: their shapes are known, everything else is an error that names them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from layerferry.layout import CODES_PLANE, RESIDUE_PLANE, Layout, ParameterSpec, Plane
from layerferry.store.away import AwayError, away

LAYOUT = Layout.of(
    [
        ParameterSpec(name="weight", shape=(40, 30), dtype=torch.bfloat16),
        ParameterSpec(name="scale", shape=(7,), dtype=torch.float32),
    ]
)


@pytest.mark.parametrize("spec", [RESIDUE_PLANE, CODES_PLANE])
def test_a_plane_shows_its_shapes(spec: object) -> None:
    spec = RESIDUE_PLANE if spec is RESIDUE_PLANE else CODES_PLANE
    num_bytes = LAYOUT.bytes(spec)
    gone, here = Plane(LAYOUT, spec, away(num_bytes, "it")), Plane(LAYOUT, spec, torch.zeros(num_bytes, dtype=torch.uint8))
    assert gone.buffer.numel() == num_bytes and gone.buffer.device.type == "meta"
    for entry in LAYOUT.entries:
        assert gone.holds(entry) == here.holds(entry)
        if here.holds(entry):
            assert gone.view(entry).shape == here.view(entry).shape and gone.view(entry).dtype == here.view(entry).dtype
    assert [one.dtype for one in gone.tensors()] == [one.dtype for one in here.tensors()]


USES: dict[str, Callable[[Tensor], object]] = {
    "written": lambda gone: gone.copy_(torch.ones(7)),
    "filled": lambda gone: gone.zero_(),
    "an element written": lambda gone: gone.__setitem__(0, 1.0),
    "added to": lambda gone: gone.add_(1.0),
    "read": lambda gone: torch.zeros(7).copy_(gone),
    "cast": lambda gone: gone.float(),
    "copied": lambda gone: gone.clone(),
    "compared": lambda gone: torch.equal(torch.zeros(7), gone),
    "summed": lambda gone: torch.sum(input=gone),
    "given to a kernel": lambda gone: gone.data_ptr(),
    "given to numpy": lambda gone: np.asarray(gone),
    "out of an operation": lambda gone: torch.add(torch.ones(7), 1.0, out=gone),
}


@pytest.mark.parametrize("use", USES)
def test_nothing_is_read_or_lost(use: str) -> None:
    entry = LAYOUT.by_name["scale"]
    gone = Plane(LAYOUT, CODES_PLANE, away(LAYOUT.bytes(CODES_PLANE), "exp_avg of layer.3")).view(entry)
    with pytest.raises(AwayError, match=r"^exp_avg of layer\.3 is @disk: "):
        USES[use](gone)
