"""Native kernels against the torch reference, bit for bit: sizes, tails, alignments, threads, extreme values, and every clone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from layerferry.optim import build
from layerferry.optim.load import load_kernels, self_check
from layerferry.optim.native_kernels import NativeKernels
from layerferry.optim.reference import ReferenceKernels
from tests.optim.arrays import assert_same_bits, extreme, fp32_planes, ordinary, run_fp32, run_split, scalars, split_planes

REFERENCE = ReferenceKernels()


@pytest.mark.parametrize("numel", [1, 2, 15, 16, 17, 31, 127, 128, 391, 100_003])
@pytest.mark.parametrize("make", [ordinary, extreme])
def test_many_steps_equal_the_reference(native: NativeKernels, make, numel: int) -> None:  # type: ignore[no-untyped-def]
    arrays = make(numel)
    steps = 20 if numel < 1000 else 4
    for dtype in (torch.bfloat16, torch.float32):
        got, wanted = (run_split(kernels, split_planes(arrays, dtype), steps) for kernels in (native, REFERENCE))
        assert_same_bits(got, wanted)
    got, wanted = (run_fp32(kernels, fp32_planes(arrays), steps) for kernels in (native, REFERENCE))
    assert_same_bits(got, wanted)


@pytest.mark.parametrize(
    "changes", [{"weight_decay": 0.0}, {"lr": 0.0}, {"grad_scale": 1.0}, {"eps": 1e-3}, {"lr": 1e-6}, {"step": 100_000}]
)
def test_every_setting_equals_the_reference(native: NativeKernels, changes: dict[str, float]) -> None:
    chosen = scalars(**changes)  # type: ignore[arg-type]
    got, wanted = split_planes(ordinary(5000)), split_planes(ordinary(5000))
    native.adamw_split(*got.values(), scalars=chosen, threads=1)
    REFERENCE.adamw_split(*wanted.values(), scalars=chosen, threads=1)
    assert_same_bits(got, wanted)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_do_not_change_a_bit(native: NativeKernels, threads: int) -> None:
    arrays = ordinary(150_001)
    assert_same_bits(run_split(native, split_planes(arrays), 2, threads), run_split(native, split_planes(arrays), 2, 1))
    assert_same_bits(run_fp32(native, fp32_planes(arrays), 2, threads), run_fp32(native, fp32_planes(arrays), 2, 1))


def test_a_span_cut_anywhere_gives_the_same_bits(native: NativeKernels) -> None:
    arrays = ordinary(1000)
    for run, make in ((run_split, split_planes), (run_fp32, fp32_planes)):
        whole = run(native, make(arrays))
        for cut in (1, 7, 63, 64, 500, 999):
            planes = make(arrays)
            run(native, {name: plane[:cut] for name, plane in planes.items()})
            run(native, {name: plane[cut:] for name, plane in planes.items()})
            assert_same_bits(planes, whole)


def test_every_clone_gives_the_same_bits(clones: dict[str, NativeKernels]) -> None:
    for arrays in (ordinary(20_011), extreme(20_011)):
        split = run_split(REFERENCE, split_planes(arrays), 3)
        split_fp32 = run_split(REFERENCE, split_planes(arrays, torch.float32), 3)
        plain = run_fp32(REFERENCE, fp32_planes(arrays), 3)
        for kernels in clones.values():
            assert_same_bits(run_split(kernels, split_planes(arrays), 3), split)
            assert_same_bits(run_split(kernels, split_planes(arrays, torch.float32), 3), split_fp32)
            assert_same_bits(run_fp32(kernels, fp32_planes(arrays), 3), plain)


def test_contraction_would_be_noticed(tmp_path: Path) -> None:
    """The trap that -ffp-contract=off closes: without it, a CPU with fused multiply-adds has other bits."""
    library = tmp_path / "contracted.so"
    flags = [flag for flag in build.BASE_FLAGS if flag != "-ffp-contract=off"] + ["-ffp-contract=fast", "-march=native"]
    subprocess.run(["c++", *flags, "-DLAYERFERRY_NO_CLONES", "-o", str(library), *map(str, build.sources())], check=True)
    assert not self_check(NativeKernels(library))


def test_the_split_master_follows_the_plain_fp32_kernel(native: NativeKernels) -> None:
    """The same bf16 gradients, 30 steps: master, moments, all the same bits. The split loses nothing."""
    arrays = ordinary(10_007)
    arrays["grad"] = arrays["grad"].bfloat16().float()
    split, plain = split_planes(arrays), fp32_planes(arrays)
    for _ in range(30):
        run_split(native, split)
        run_fp32(native, plain)
    master = torch.empty_like(plain["weight"])
    native.join(split["weight"], split["residue"], master, threads=1)
    got = {"weight": master, "exp_avg": split["exp_avg"], "exp_avg_sq": split["exp_avg_sq"]}
    assert_same_bits(got, {name: plain[name] for name in got})


@pytest.mark.parametrize("kernels", [REFERENCE, load_kernels()], ids=["reference", "native"])
def test_padding_stays_zero(kernels: NativeKernels) -> None:
    zeros = {name: torch.zeros(300) for name in ("master", "grad", "exp_avg", "exp_avg_sq")}
    for run, make in ((run_split, split_planes), (run_fp32, fp32_planes)):
        for name, plane in run(kernels, make(zeros), 5).items():
            assert not plane.view(torch.uint8).any(), name


def test_moments_never_rest_in_denormals(native: NativeKernels) -> None:
    """One gradient and never another: the moments decay to zero, not into numbers that slow the processor down."""
    arrays = ordinary(512)
    planes = fp32_planes(arrays)
    run_fp32(native, planes, 1)
    planes["grad"].zero_()
    smallest = torch.finfo(torch.float32).smallest_normal
    for step in range(2, 2200):
        native.adamw_fp32(*planes.values(), scalars=scalars(step), threads=1)
        for name in ("exp_avg", "exp_avg_sq"):
            assert bool(((planes[name] == 0) | (planes[name].abs() >= smallest)).all())
    assert not planes["exp_avg"].any() and not planes["exp_avg_sq"].any()


def test_nan_gradients_stay_visible_in_the_weight(native: NativeKernels) -> None:
    """An all-ones NaN, CUDA's own, must not round up to a weight of -0.0."""
    arrays = ordinary(64)
    arrays["grad"] = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for kernels in (native, REFERENCE):
        planes = run_split(kernels, split_planes(arrays, torch.float32))
        assert bool(planes["weight"].isnan().all())
