"""The device's pass over any format gives the bits of the CPU's, and units in every format may live anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from layerferry.backends.cuda import device_count
from layerferry.config import OptimConfig
from layerferry.layout import Layout, ParameterSpec
from layerferry.optim import adafactor
from layerferry.optim.device_kernels import TritonKernels, device_kernels
from layerferry.optim.kernels import Moment, Operands
from layerferry.optim.load import load_kernels
from layerferry.optim.reference import ReferenceKernels
from tests.gpu.small import assert_places_do_not_matter
from tests.optim.arrays import assert_same_bits, extreme, ordinary
from tests.optim.format_arrays import FORMATS, left, operands, run
from tests.optim.test_adafactor import stepped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]


def there(given: Operands) -> Operands:
    """Copies @device."""

    def moved(moment: Moment | None) -> Moment | None:
        if moment is None:
            return None
        return Moment(values=moment.values.cuda(), exponents=None if moment.exponents is None else moment.exponents.cuda())

    return Operands(
        weight=given.weight.cuda(),
        residue=None if given.residue is None else given.residue.cuda(),
        grad=given.grad.cuda(),
        first=moved(given.first),
        second=moved(given.second),
        start=given.start,
    )


@pytest.mark.parametrize(("rule", "master", "moments"), FORMATS)
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_as_the_cpu(rule: str, master: str, moments: str, grad_dtype: torch.dtype) -> None:
    assert isinstance(device_kernels(), TritonKernels)
    for arrays in (ordinary(128 * 701), extreme(128 * 37)):
        here = operands(arrays, rule, master, moments, grad_dtype=grad_dtype, start=1280)
        device = there(here)
        expected = run(ReferenceKernels(), here, rule, 5)
        run(device_kernels(), device, rule, 5)
        assert_same_bits({name: plane.cpu() for name, plane in left(device).items()}, expected)


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("master", ["fp32", "24bit", "bf16"])
@pytest.mark.parametrize("make", [ordinary, extreme])
def test_adafactor_has_the_bits_of_the_cpu(
    make: Callable[[int, int], dict[str, torch.Tensor]], master: str, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over matrices whose heights and widths are no powers of two: a division is a division there too."""
    monkeypatch.setattr(adafactor, "device_kernels", device_kernels if triton else ReferenceKernels)
    expected = stepped(ReferenceKernels(), make, master)
    found = stepped(ReferenceKernels(), make, master, device="cuda")
    assert_same_bits({name: values.cpu() for name, values in found.items()}, expected)


@pytest.mark.parametrize("master", ["24bit", "bf16"])
def test_adafactor_has_the_bits_of_the_cpu_over_layers_of_many_tiles(master: str) -> None:
    shapes = ((2048, 5632), (5, 1300, 700), (300, 4099), (70000,))
    layout = Layout.of([ParameterSpec(name=str(shape), shape=shape, dtype=torch.bfloat16) for shape in shapes])
    expected = stepped(load_kernels(), ordinary, master, layout, threads=8)
    found = stepped(load_kernels(), ordinary, master, layout, device="cuda")
    assert_same_bits({name: values.cpu() for name, values in found.items()}, expected)


@pytest.mark.parametrize(
    "optim",
    [
        *({"optim": "adamw_8bit"}, {"master_weights": "bf16"}, {"optim": "lion_8bit"}, {"optim": "adafactor"}),
        {"optim": "sgd", "momentum": 0.9},
    ],
    ids=str,
)
def test_units_may_live_on_the_device_without_changing_a_bit(optim: dict[str, object]) -> None:
    assert_places_do_not_matter(OptimConfig(**optim))  # type: ignore[arg-type]
