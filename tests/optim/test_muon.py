"""Newton-Schulz against torch's own, bit for bit; Muon against ``torch.optim.Muon``; its two passes against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError
from layerferry.layout import GRAD, RESIDUE, WEIGHT, Entry, Layout, ParameterSpec, Plane
from layerferry.master import join_master
from layerferry.optim import orthogonal
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import StagedOptimizer, StepHyper
from layerferry.optim.choose import NAMES, optimizer_for
from layerferry.optim.formats import StateFormat
from layerferry.optim.muon import Muon
from layerferry.optim.orthogonal import COEFFICIENTS, EPS, NUM_STEPS, Stack, orthogonalises, stacks_of
from layerferry.optim.reference import ReferenceKernels
from layerferry.optim.sgd import MOMENTUM
from layerferry.store.store import plane_specs

SHAPES = {"tall": (48, 20), "wide": (20, 48), "square": (24, 24), "experts": (5, 16, 24), "tall experts": (3, 33, 17)}
OTHERS = {"table": (40, 16), "norm": (50,)}
LAYOUT = Layout.of(
    [
        *(ParameterSpec(name=name, shape=shape, dtype=torch.bfloat16, matrix=True) for name, shape in SHAPES.items()),
        *(ParameterSpec(name=name, shape=shape, dtype=torch.bfloat16, decays=len(shape) > 1) for name, shape in OTHERS.items()),
        ParameterSpec(name="gate", shape=(7, 9), dtype=torch.float32, matrix=True),
        ParameterSpec(name="gate bias", shape=(7,), dtype=torch.float32, decays=False),
        ParameterSpec(name="frozen", shape=(9, 16), dtype=torch.bfloat16, trained=False, matrix=True),
    ]
)
TRAINED = [entry for entry in LAYOUT.entries if entry.trained]
LR, GRAD_SCALE = 1e-2, 0.5


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks are worked on two matrices at a time."""
    monkeypatch.setattr(orthogonal, "MOST_ELEMENTS", 2 * 33 * 24)
    stacks_of.cache_clear()
    yield
    stacks_of.cache_clear()


def planes_of(optimizer: Muon | AdamW, layout: Layout = LAYOUT, specs: dict[str, object] | None = None) -> dict[str, Plane]:
    wanted = {**plane_specs(optimizer.state_planes), **(specs or {})}
    planes = {kind: Plane(layout, spec, torch.zeros(layout.bytes(spec), dtype=torch.uint8)) for kind, spec in wanted.items()}
    generator = torch.Generator().manual_seed(0)
    for view in planes[WEIGHT].views():
        view.copy_(torch.randn(view.shape, generator=generator))
    return planes


def fill(planes: dict[str, Plane], gradients: list[Tensor]) -> None:
    for entry, gradient in zip(TRAINED, gradients, strict=True):
        planes[GRAD].view(entry).copy_(gradient)


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(entry.shape, generator=generator).to(entry.dtype) for entry in TRAINED]


def master(planes: dict[str, Plane], entry: Entry) -> Tensor:
    weight = planes[WEIGHT].view(entry)
    return weight.clone() if entry.dtype == torch.float32 else join_master(weight, planes[RESIDUE].view(entry))


def matrices(values: Tensor) -> list[Tensor]:
    return list(values.view(-1, *values.shape[-2:]))


# -------------------------------------------------------------------- orthogonalising


def stacks_of_shape(shape: tuple[int, ...]) -> tuple[Stack, ...]:
    return stacks_of(Layout.of([ParameterSpec(name="w", shape=shape, dtype=torch.bfloat16, matrix=True)]))


@pytest.mark.parametrize("shape", [*SHAPES.values(), (257, 65), (100, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
def test_newton_schulz_is_torchs(pairs: None, shape: tuple[int, ...], dtype: torch.dtype, size: float) -> None:
    """Bit for bit, whatever the plane's type and in a workspace of just the bytes that were counted."""
    given = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * size).bfloat16()
    expected = torch.stack([_zeropower_via_newtonschulz(m.clone(), COEFFICIENTS, NUM_STEPS, EPS) for m in matrices(given)])
    values = given.to(dtype).view(-1)
    for stack in stacks_of_shape(shape):
        needed = stack.workspace_bytes(dtype)
        guarded = torch.full((needed + 256,), 0xFF, dtype=torch.uint8)
        orthogonal.orthogonalise(stack, values[stack.start : stack.start + stack.numel], guarded[:needed])
        assert bool((guarded[needed:] == 0xFF).all())
    assert torch.equal(values.view(shape), expected.view(shape).to(dtype))


def test_a_matrix_of_zeros_stays_one() -> None:
    (stack,) = stacks_of_shape((12, 8))
    values = torch.zeros(96, dtype=torch.bfloat16)
    orthogonal.orthogonalise(stack, values, torch.zeros(stack.workspace_bytes(torch.bfloat16), dtype=torch.uint8))
    assert not values.any()


def test_singular_values_come_near_one() -> None:
    """Those that are not tiny: the five steps bring everything above 0.01 of the norm to between 0.5 and 1.5 or so."""
    (stack,) = stacks_of_shape((64, 40))
    values = torch.randn(64 * 40, generator=torch.Generator().manual_seed(0))
    orthogonal.orthogonalise(stack, values, torch.zeros(stack.workspace_bytes(torch.float32), dtype=torch.uint8))
    found = torch.linalg.svdvals(values.view(64, 40))
    assert float(found.min()) > 0.5 and float(found.max()) < 1.5


def test_stacks_cover_every_trained_matrix_once(pairs: None) -> None:
    found: dict[str, list[tuple[int, int]]] = {}
    for stack in stacks_of(LAYOUT):
        found.setdefault(stack.entry.name, []).append((stack.start, stack.start + stack.numel))
        assert stack.numel <= orthogonal.MOST_ELEMENTS or stack.count == 1
    assert set(found) == {*SHAPES, "gate"} and len(found["experts"]) == 2
    for entry in (entry for entry in TRAINED if entry.matrix):
        begins, ends = zip(*found[entry.name], strict=True)
        assert [*begins, entry.numel] == [0, *ends]


def test_products_are_counted_as_they_are() -> None:
    (stack,) = stacks_of_shape((48, 20))
    by_hand = 5 * (2 * 20 * 48 * 20 + 2 * 20 * 20 * 20 + 2 * 48 * 20 * 20)
    assert stack.flops == by_hand


# -------------------------------------------------------------------- the whole rule


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_is_torchs(weight_decay: float) -> None:
    """Twelve steps with a momentum of 1/2 and gradients that are small whole numbers: momentum and update are exact, in whatever
    order they are computed, so that what is orthogonalised is the same, and what remains is some roundings of the master."""
    optimizer = Muon(momentum=0.5, weight_decay=weight_decay)
    planes = planes_of(optimizer)
    own = [entry for entry in TRAINED if entry.matrix]
    theirs = {entry.name: [torch.nn.Parameter(m.clone()) for m in matrices(master(planes, entry))] for entry in own}
    flat = [parameter for parameters in theirs.values() for parameter in parameters]
    reference = torch.optim.Muon(flat, lr=LR, weight_decay=weight_decay, momentum=0.5, adjust_lr_fn="match_rms_adamw")
    for step in range(1, 13):
        generator = torch.Generator().manual_seed(step)
        given = [torch.randint(-3, 4, entry.shape, generator=generator).to(entry.dtype) for entry in TRAINED]
        fill(planes, given)
        optimizer.step(planes, LAYOUT, StepHyper(lr=LR, step=step, grad_scale=GRAD_SCALE), threads=1)
        for entry, gradient in zip(TRAINED, given, strict=True):
            if entry.matrix:
                for parameter, one in zip(theirs[entry.name], matrices(gradient), strict=True):
                    parameter.grad = one.float() * GRAD_SCALE
        reference.step()
    for entry in own:
        expected = torch.stack([parameter.detach() for parameter in theirs[entry.name]]).view(entry.shape)
        bound = 12 * 4 * 2.0**-24 * (float(expected.abs().max()) + 1.0)
        assert float((master(planes, entry) - expected).abs().max()) < bound, entry.name
        buffer = torch.stack([reference.state[parameter]["momentum_buffer"] for parameter in theirs[entry.name]])
        assert torch.equal(planes[MOMENTUM].view(entry), buffer.view(entry.shape))


def test_the_rest_is_adamws_bit_for_bit() -> None:
    lean = AdamW(weight_decay=0.1, betas=(0.9, 0.95), state_format=StateFormat(moments="8bit"), seed=3)
    muon = Muon(weight_decay=0.1, betas=(0.9, 0.95), seed=3)
    found = [planes_of(optimizer) for optimizer in (muon, lean)]
    for step in range(1, 5):
        for planes, optimizer in zip(found, (muon, lean), strict=True):
            fill(planes, gradients(step))
            optimizer.step(planes, LAYOUT, StepHyper(lr=LR, step=step, grad_scale=GRAD_SCALE, stream=7), threads=1)
    for entry in (entry for entry in TRAINED if not entry.matrix):
        for kind in (WEIGHT, *lean.moments):
            assert torch.equal(found[0][kind].view(entry), found[1][kind].view(entry)), (kind, entry.name)
        for kind in lean.moments:
            assert torch.equal(found[0][kind].exponents_of(entry), found[1][kind].exponents_of(entry))


def test_the_first_half_is_its_formula() -> None:
    """In fp64: three fp32 roundings of numbers no larger than the sum of sizes, and one of bf16."""
    optimizer = Muon(momentum=0.95)
    planes = planes_of(optimizer)
    momentum = {entry.name: torch.zeros(entry.shape, dtype=torch.float64) for entry in TRAINED}
    for step in range(1, 7):
        fill(planes, gradients(step))
        optimizer.prepare(planes, LAYOUT, StepHyper(lr=LR, step=step, grad_scale=0.37), threads=1)
        for entry, gradient in zip(TRAINED, gradients(step), strict=True):
            if entry.matrix:
                scaled = gradient.double() * 0.37
                momentum[entry.name] = 0.95 * momentum[entry.name] + 0.05 * scaled
                update = 0.05 * scaled + 0.95 * momentum[entry.name]
                assert bool(((planes[MOMENTUM].view(entry) - momentum[entry.name]).abs() <= step * 2.0**-22).all())
                assert bool(((planes[GRAD].view(entry).double() - update).abs() <= 2.0**-8 * update.abs() + 2.0**-20).all())


@pytest.mark.parametrize("master_bits", ["fp32", "24bit", "bf16"])
@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_native_and_torch_stages_and_threads_agree(pairs: None, master_bits: str, moments: str) -> None:
    """The three stages are the step, whatever computes the passes; padding stays zero."""
    state_format = StateFormat(master=master_bits, moments=moments)
    found = []
    for kernels, threads in ((None, 1), (None, 3), (ReferenceKernels(), 1)):
        optimizer = Muon(weight_decay=0.1, state_format=state_format, kernels=kernels)
        planes = planes_of(optimizer)
        for step in range(1, 4):
            fill(planes, gradients(step))
            optimizer.step(planes, LAYOUT, StepHyper(lr=LR, step=step, grad_scale=GRAD_SCALE), threads=threads)
        found.append(planes)
    for kind, plane in found[0].items():
        assert all(torch.equal(plane.buffer, other[kind].buffer) for other in found[1:]), kind
        if not plane.spec.coded:
            held = sum(int(view.contiguous().view(torch.uint8).count_nonzero()) for view in plane.views())
            assert held == int(plane.buffer.count_nonzero()), f"{kind}: padding is not zero"


def test_decay_and_step_size() -> None:
    """With a gradient of zero the matrices decay alone; with one, their update has AdamW's size."""
    optimizer = Muon(weight_decay=0.1)
    planes = planes_of(optimizer)
    before = {entry.name: master(planes, entry) for entry in TRAINED}
    optimizer.step(planes, LAYOUT, StepHyper(lr=LR, step=1), threads=1)
    for entry in TRAINED:
        expected = before[entry.name].double() * (1 - LR * 0.1 * entry.decays)
        assert float((master(planes, entry).double() - expected).abs().max()) <= 2.0**-23 * 4
    fill(planes, gradients(1))
    before = {entry.name: master(planes, entry) for entry in TRAINED}
    optimizer.step(planes, LAYOUT, StepHyper(lr=LR, step=2), threads=1)
    for entry in (entry for entry in TRAINED if entry.matrix):
        moved = (master(planes, entry) - before[entry.name] * (1 - LR * 0.1)) / LR
        singular = 0.2 * math.sqrt(max(entry.shape[-2:]) * min(entry.shape[-2:]) / math.prod(entry.shape[-2:]))
        assert 0.5 * singular < float(moved.square().mean().sqrt()) < 1.3 * singular


# -------------------------------------------------------------------- planes


def test_a_plane_for_matrices_holds_nothing_else() -> None:
    def padded(names: list[str], shapes: dict[str, tuple[int, ...]]) -> int:
        return sum(-(-math.prod(shapes[name]) // 128) * 128 for name in names)

    specs = plane_specs(Muon().state_planes)
    own, rest = padded([*SHAPES], SHAPES) + 128, padded([*OTHERS], OTHERS) + 128
    assert LAYOUT.bytes(specs[MOMENTUM]) == 4 * own
    assert LAYOUT.bytes(specs["exp_avg"]) == LAYOUT.bytes(specs["exp_avg_sq"]) == rest + rest // 128
    planes = planes_of(Muon())
    assert [entry.name for entry in LAYOUT.entries if planes[MOMENTUM].holds(entry)] == [*SHAPES, "gate"]
    assert [entry.name for entry in LAYOUT.entries if planes["exp_avg"].holds(entry)] == [*OTHERS, "gate bias"]
    for number, view in enumerate(planes[MOMENTUM].views()):
        view.fill_(number + 1)
    for number, view in enumerate(planes[MOMENTUM].views()):
        assert bool((view == number + 1).all()), "parameters of a packed plane do not overlap"


def test_who_has_stages_says_so_in_its_planes() -> None:
    """The planner sees planes, the engine sees the optimizer."""
    for name in NAMES:
        optimizer = optimizer_for(OptimConfig(optim=name))
        assert isinstance(optimizer, StagedOptimizer) == orthogonalises(optimizer.state_planes) == name.startswith("muon")


def test_its_words() -> None:
    muon = optimizer_for(OptimConfig(optim="muon", adam_beta2=0.95, weight_decay=0.1), seed=5)
    assert isinstance(muon, Muon)
    assert (muon.momentum, muon.weight_decay, muon.format) == (0.95, 0.1, StateFormat())
    assert muon.bytes_per_param() == 4.0
    lean = optimizer_for(OptimConfig(optim="muon_8bit", momentum=0.9))
    assert isinstance(lean, Muon)
    assert (lean.momentum, lean.format) == (0.9, StateFormat(master="24bit", moments="8bit"))
    with pytest.raises(ConfigError, match="momentum=1.5 is outside"):
        Muon(momentum=1.5)
