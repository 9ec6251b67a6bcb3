"""Any rule in any format: native against the torch reference, bit for bit, in every clone; cut and threaded anywhere."""

from __future__ import annotations

import pytest
import torch

from layerferry.errors import ConfigError
from layerferry.layout import CODES_PLANE, FP32_PLANE, NO_PLANE, RESIDUE, RESIDUE8_PLANE, Layout, ParameterSpec
from layerferry.optim.adamw import AdamW
from layerferry.optim.formats import StateFormat
from layerferry.optim.lion import Lion
from layerferry.optim.load import load_kernels
from layerferry.optim.native_kernels import NativeKernels
from layerferry.optim.reference import ReferenceKernels, cut
from layerferry.optim.sgd import SGD
from layerferry.store.store import plane_specs
from tests.optim.arrays import assert_same_bits, extreme, ordinary
from tests.optim.format_arrays import FORMATS, left, operands, rounding, rule_of, run

REFERENCE = ReferenceKernels()


@pytest.mark.parametrize(("rule", "master", "moments"), FORMATS)
@pytest.mark.parametrize("make", [ordinary, extreme])
def test_native_equals_the_reference(native: NativeKernels, make, rule: str, master: str, moments: str) -> None:  # type: ignore[no-untyped-def]
    arrays = make(128 * 37)
    for dtype in (torch.bfloat16, torch.float32):
        got, wanted = (
            run(kernels, operands(arrays, rule, master, moments, grad_dtype=dtype, start=1280), rule, 6)
            for kernels in (native, REFERENCE)
        )
        assert_same_bits(got, wanted)


@pytest.mark.parametrize(("rule", "master", "moments"), FORMATS)
def test_every_clone_gives_the_same_bits(clones: dict[str, NativeKernels], rule: str, master: str, moments: str) -> None:
    for arrays in (ordinary(128 * 50), extreme(128 * 50)):
        wanted = run(REFERENCE, operands(arrays, rule, master, moments), rule, 4)
        for kernels in clones.values():
            assert_same_bits(run(kernels, operands(arrays, rule, master, moments), rule, 4), wanted)


@pytest.mark.parametrize("rule", ["adamw", "momentum"])
def test_threads_do_not_change_a_bit(native: NativeKernels, rule: str) -> None:
    arrays = ordinary(128 * 1200)
    one = run(native, operands(arrays, rule, "24bit", "8bit"), rule, 2)
    for threads in (2, 3, 7):
        assert_same_bits(run(native, operands(arrays, rule, "24bit", "8bit"), rule, 2, threads), one)


def test_a_span_cut_between_blocks_gives_the_same_bits(native: NativeKernels) -> None:
    arrays = ordinary(1280)
    whole = run(native, operands(arrays, "adamw", "24bit", "8bit"), "adamw")
    for at in (128, 640, 1152):
        given = operands(arrays, "adamw", "24bit", "8bit")
        for part in (cut(given, at, 1280), cut(given, 0, at)):
            run(native, part, "adamw")
        assert_same_bits(left(given), whole)


def test_fp32_everywhere_is_the_plain_kernel(native: NativeKernels) -> None:
    """``update`` takes the tuned kernel where there is one; the general pass has the same bits."""
    arrays = ordinary(128 * 9)
    for master in ("whole", "fp32"):
        given, other = (operands(arrays, "adamw", master, "fp32") for _ in range(2))
        run(native, given, "adamw", 3)
        for step in (1, 2, 3):
            native.general_update(rule_of("adamw", step), other, rounding=rounding(step), threads=1)
        assert_same_bits(left(given), left(other))


@pytest.mark.parametrize("kernels", [REFERENCE, load_kernels()], ids=["reference", "native"])
@pytest.mark.parametrize(("rule", "master", "moments"), FORMATS)
def test_padding_stays_zero(kernels: NativeKernels, rule: str, master: str, moments: str) -> None:
    zeros = {name: torch.zeros(256) for name in ("master", "grad", "exp_avg", "exp_avg_sq")}
    for name, plane in run(kernels, operands(zeros, rule, master, moments), rule, 5).items():
        assert not plane.view(torch.uint8).any(), name


def test_nan_gradients_stay_visible_in_the_weight(native: NativeKernels) -> None:
    arrays = ordinary(128)
    arrays["grad"] = torch.full((128,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for kernels in (native, REFERENCE):
        for master in ("24bit", "bf16"):
            given = operands(arrays, "adamw", master, "8bit", grad_dtype=torch.float32)
            assert bool(run(kernels, given, "adamw")["weight"].isnan().all())


def test_moments_fade_to_zero_without_denormals(native: NativeKernels) -> None:
    """One gradient and never another: exp_avg goes down to zero, exp_avg_sq to the smallest normal code."""
    given = operands(ordinary(256), "adamw", "24bit", "8bit")
    run(native, given, "adamw")
    given.grad.zero_()
    for step in range(2, 2000):
        native.update(rule_of("adamw", step), given, rounding=rounding(step), threads=1)
    assert given.first is not None and given.second is not None and given.second.exponents is not None
    assert not given.first.values.any()
    assert int(given.second.values.max()) <= 1 and not given.second.exponents.any()
    assert bool(given.weight.isfinite().all())


@pytest.mark.parametrize(
    ("optimizer", "total"),
    [
        (AdamW(state_format=StateFormat()), 14),
        (AdamW(state_format=StateFormat(master="24bit", moments="8bit")), 7 + 2 / 128),
        (AdamW(state_format=StateFormat(master="bf16", moments="8bit")), 6 + 2 / 128),
        (AdamW(state_format=StateFormat(master="bf16")), 12),
        (Lion(), 10),
        (Lion(state_format=StateFormat(master="24bit", moments="8bit")), 6 + 1 / 128),
        (SGD(momentum=0.9), 10),
        (SGD(), 6),
    ],
)
def test_bytes_per_parameter(optimizer: AdamW, total: float) -> None:
    layout = Layout.of([ParameterSpec(name="weight", shape=(128, 64), dtype=torch.bfloat16)])
    found = sum(layout.bytes(spec) for spec in plane_specs(optimizer.state_planes).values())
    assert found == total * layout.numel
    moments = {kind: spec for kind, spec in optimizer.state_planes.items() if kind != RESIDUE}
    assert sum(layout.bytes(spec) for spec in moments.values()) == optimizer.bytes_per_param() * layout.numel


def test_the_planes_of_a_format() -> None:
    assert StateFormat().planes(("a",)) == {"a": FP32_PLANE}
    assert StateFormat(master="24bit", moments="8bit").planes(("a",)) == {RESIDUE: RESIDUE8_PLANE, "a": CODES_PLANE}
    assert StateFormat(master="bf16").planes(()) == {RESIDUE: NO_PLANE}
    with pytest.raises(ConfigError, match="master_weights"):
        StateFormat(master="fp16")
    with pytest.raises(ConfigError, match="moments"):
        StateFormat(moments="4bit")
