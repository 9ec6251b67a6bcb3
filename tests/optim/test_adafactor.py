"""Adafactor against transformers' own, over matrices, vectors and experts; its state's bytes; chunks and order; native against
torch, bit for bit, in every clone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from layerferry.layout import GRAD, RESIDUE, WEIGHT, WEIGHT_PLANE, Layout, ParameterSpec, Plane
from layerferry.master import join_master
from layerferry.optim import reference_factored
from layerferry.optim.adafactor import COLUMNS, ROWS, Adafactor
from layerferry.optim.base import StepHyper
from layerferry.optim.formats import StateFormat
from layerferry.optim.kernels import Kernels
from layerferry.optim.native_kernels import NativeKernels
from layerferry.optim.reference import ReferenceKernels
from layerferry.optim.reference_factored import tiled_sum
from layerferry.store.store import plane_specs
from tests.optim.arrays import assert_same_bits, extreme, ordinary

SHAPES = {"matrix": (37, 51), "vector": (75,), "experts": (3, 20, 33), "wide": (2, 300)}
LAYOUT = Layout.of(
    [ParameterSpec(name=name, shape=shape, dtype=torch.bfloat16, decays=name != "vector") for name, shape in SHAPES.items()]
    + [ParameterSpec(name="gate", shape=(9, 16), dtype=torch.float32)]
)


def planes_of(optimizer: Adafactor) -> dict[str, Plane]:
    specs = plane_specs(optimizer.state_planes)
    planes = {kind: Plane(LAYOUT, spec, torch.zeros(LAYOUT.bytes(spec), dtype=torch.uint8)) for kind, spec in specs.items()}
    generator = torch.Generator().manual_seed(0)
    for view in planes[WEIGHT].views():
        view.copy_(torch.randn(view.shape, generator=generator) * 0.05)
    return planes


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(e.shape, generator=generator) * 1e-3 * (1 + step % 3)).to(e.dtype) for e in LAYOUT.entries]


def run(optimizer: Adafactor, steps: int) -> dict[str, Plane]:
    planes = planes_of(optimizer)
    for step in range(1, steps + 1):
        for view, gradient in zip(planes[GRAD].views(), gradients(step), strict=True):
            view.copy_(gradient)
        optimizer.step(planes, LAYOUT, StepHyper(lr=1e-2, step=step, grad_scale=0.5), threads=1)
    return planes


def masters(planes: dict[str, Plane]) -> list[torch.Tensor]:
    found = []
    for entry in LAYOUT.entries:
        weight = planes[WEIGHT].view(entry)
        found.append(weight.clone() if entry.dtype == torch.float32 else join_master(weight, planes[RESIDUE].view(entry)))
    return found


def test_the_steps_are_those_of_transformers() -> None:
    """Six steps, each the same sums in another order: some ten roundings of fp32 in the factors, 1e-5 of an update of size lr."""
    from transformers.optimization import Adafactor as Theirs

    optimizer = Adafactor(weight_decay=0.1)
    parameters = [torch.nn.Parameter(master) for master in masters(planes_of(optimizer))]
    groups = [
        {
            "params": [p for p, e in zip(parameters, LAYOUT.entries, strict=True) if e.decays is decays],
            "weight_decay": 0.1 * decays,
        }
        for decays in (True, False)
    ]
    theirs = Theirs(groups, lr=1e-2, scale_parameter=False, relative_step=False)
    for step in range(1, 7):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.float() * 0.5
        theirs.step()
    planes = run(optimizer, 6)
    for found, expected in zip(masters(planes), parameters, strict=True):
        assert float((found - expected.detach()).abs().max()) < 6 * 1e-5 * 1e-2
    state = theirs.state[parameters[0]]
    entry = LAYOUT.entries[0]
    torch.testing.assert_close(planes[ROWS].view(entry)[0], state["exp_avg_sq_row"], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(planes[COLUMNS].view(entry)[0], state["exp_avg_sq_col"], rtol=1e-5, atol=0.0)


def test_state_is_a_row_and_a_column_of_each_matrix() -> None:
    def padded(count: int) -> int:
        return -(-count // 128) * 128 * 4

    optimizer = Adafactor()
    specs = optimizer.state_planes
    rows = [padded(math.prod(shape[:-1])) if len(shape) > 1 else padded(*shape) for shape in (*SHAPES.values(), (9, 16))]
    columns = [padded(math.prod(s[:-2]) * s[-1]) if len(s) > 1 else 0 for s in (*SHAPES.values(), (9, 16))]
    assert LAYOUT.bytes(specs[ROWS]) == sum(rows) and LAYOUT.bytes(specs[COLUMNS]) == sum(columns)
    planes = run(optimizer, 1)
    assert tuple(planes[ROWS].view(LAYOUT.entries[0]).shape) == (1, 37)
    assert all(bool((view > 0).all()) for view in planes[ROWS].views())


@pytest.mark.parametrize("master", ["fp32", "24bit", "bf16"])
def test_padding_stays_zero_and_a_step_repeats_itself(master: str) -> None:
    one, other = (run(Adafactor(state_format=StateFormat(master=master), weight_decay=0.1), 3) for _ in range(2))
    for kind, plane in one.items():
        assert torch.equal(plane.buffer, other[kind].buffer)
        own = sum(int(view.contiguous().view(torch.uint8).count_nonzero()) for view in _views(plane))
        assert own == int(plane.buffer.count_nonzero()), f"{kind}: padding is not zero"


def _views(plane: Plane) -> list[torch.Tensor]:
    return [plane.view(entry) for entry in LAYOUT.entries if entry.dtype in plane.sections and plane.view(entry).numel()]


def test_how_much_torch_holds_at_a_time_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [ParameterSpec(name="experts", shape=(2, 700, 130), dtype=torch.bfloat16)]
    wanted = stepped(REFERENCE, ordinary, "fp32", Layout.of(specs))
    monkeypatch.setattr(reference_factored, "CHUNK_ELEMENTS", 100)
    assert_same_bits(stepped(REFERENCE, ordinary, "fp32", Layout.of(specs)), wanted)


def test_the_default_type_of_the_process_does_not_matter() -> None:
    """It is bf16 while another thread builds a model."""
    expected = masters(run(Adafactor(), 3))
    start = planes_of(Adafactor())
    for step in range(1, 4):
        for view, gradient in zip(start[GRAD].views(), gradients(step), strict=True):
            view.copy_(gradient)
        torch.set_default_dtype(torch.bfloat16)
        try:
            Adafactor().step(start, LAYOUT, StepHyper(lr=1e-2, step=step, grad_scale=0.5), threads=1)
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found, whole) for found, whole in zip(masters(start), expected, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17, 40])
def test_tiles_are_filled_up_with_zeros_halved_and_added_in_order(count: int) -> None:
    values = torch.randn(count, 3)
    expected = torch.zeros(3)
    for start in range(0, count, 16):
        tile = torch.zeros(16, 3)
        tile[: len(values[start : start + 16])] = values[start : start + 16]
        for half in (8, 4, 2, 1):
            tile = tile[:half] + tile[half:]
        expected = expected + tile[0]
    assert torch.equal(tiled_sum(values, 0, 16), expected) and torch.equal(tiled_sum(values.T, 1, 16), expected)


# ---------------------------------------------------------------- native

REFERENCE = ReferenceKernels()
ODD = (
    (1,),
    (129,),
    (1, 1),
    (5, 1),
    (1, 7),
    (2, 300),
    (37, 51),
    (70, 257),
    (16, 128),
    (3, 20, 33),
    (2, 3, 1),
    (4, 9, 130),
    (2, 600, 3),
    (1100, 2),
)
"""One row, column or element; rows that begin anywhere in a block; tiles of every kind that leave a rest."""
ODD_LAYOUT = Layout.of(
    [
        ParameterSpec(name=f"{dtype} {shape}", shape=shape, dtype=dtype, decays=len(shape) > 1)
        for dtype in (torch.bfloat16, torch.float32)
        for shape in ODD
    ]
)


def stepped(
    kernels: Kernels,
    make: Callable[[int, int], dict[str, torch.Tensor]],
    master: str,
    layout: Layout = ODD_LAYOUT,
    threads: int = 1,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """Every section of every plane after three steps, of gradients and weights as ``make`` gives them."""
    optimizer = Adafactor(state_format=StateFormat(master=master), weight_decay=0.1, seed=3, kernels=kernels)
    specs = plane_specs(optimizer.state_planes)
    rooms = {kind: torch.zeros(layout.bytes(spec), dtype=torch.uint8, device=device) for kind, spec in specs.items()}
    planes = {kind: Plane(layout, spec, rooms[kind]) for kind, spec in specs.items()}
    for number, entry in enumerate(layout.entries):
        planes[WEIGHT].view(entry).copy_(make(entry.numel, number)["master"].view(entry.shape))
    for step in (1, 2, 3):
        for number, entry in enumerate(layout.entries):
            planes[GRAD].view(entry).copy_(make(entry.numel, 100 * step + number)["grad"].view(entry.shape))
        optimizer.step(planes, layout, StepHyper(lr=1e-2, step=step, grad_scale=0.37, stream=2), threads)
    return {f"{kind} {dtype}": values for kind, plane in planes.items() for dtype, values in plane.sections.items()}


@pytest.mark.parametrize("master", ["fp32", "24bit", "bf16"])
@pytest.mark.parametrize("make", [ordinary, extreme])
def test_native_equals_torch(native: NativeKernels, make: Callable[[int, int], dict[str, torch.Tensor]], master: str) -> None:
    """Ordinary gradients; and those with infinities and NaN, which spread over the parameter that has them."""
    wanted = stepped(REFERENCE, make, master)
    assert_same_bits(stepped(native, make, master), wanted)
    finite = bool(wanted[f"{WEIGHT} {torch.bfloat16}"].isfinite().all())
    assert finite == (make is ordinary)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_gradient_spoils_its_parameter_alone(native: NativeKernels, bad: float) -> None:
    def make(numel: int, seed: int) -> dict[str, torch.Tensor]:
        arrays = ordinary(numel, seed)
        if numel == 37 * 51 and seed > 100:
            arrays["grad"][numel // 2] = bad
        return arrays

    wanted = stepped(REFERENCE, make, "24bit")
    assert_same_bits(stepped(native, make, "24bit"), wanted)
    weight = Plane(ODD_LAYOUT, WEIGHT_PLANE, torch.zeros(ODD_LAYOUT.bytes(WEIGHT_PLANE), dtype=torch.uint8))
    for dtype, section in weight.sections.items():
        section.copy_(wanted[f"{WEIGHT} {dtype}"])
    spoilt = {entry.shape for entry in ODD_LAYOUT.entries if not weight.view(entry).isfinite().all()}
    assert spoilt == {(37, 51)}


@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_threads_do_not_change_a_bit(native: NativeKernels, master: str) -> None:
    """Enough elements that every thread has some, in tiles that are shared out as threads come."""
    specs = [ParameterSpec(name=str(shape), shape=shape, dtype=torch.bfloat16) for shape in ((299, 333), (3, 101, 257))]
    wanted = stepped(REFERENCE, ordinary, master, Layout.of(specs))
    for threads in (1, 2, 3, 7):
        assert_same_bits(stepped(native, ordinary, master, Layout.of(specs), threads), wanted)


@pytest.mark.parametrize("master", ["fp32", "24bit", "bf16"])
def test_every_clone_gives_the_same_bits(clones: dict[str, NativeKernels], master: str) -> None:
    for make in (ordinary, extreme):
        wanted = stepped(REFERENCE, make, master)
        for kernels in clones.values():
            assert_same_bits(stepped(kernels, make, master), wanted)
