"""The split master is exact: every upper half with chosen and random lower halves, in torch and in the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from layerferry.master import QUIET_NAN_BITS, join_master, split_master
from layerferry.optim.kernels import Kernels
from layerferry.optim.load import load_kernels
from layerferry.optim.reference import ReferenceKernels

UPPER = torch.arange(2**16, dtype=torch.int64)
LOWER = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def every_kind() -> Tensor:
    """fp32 [2**16 * 7]: all signs and exponents, the lower halves where rounding turns, and random ones."""
    generator = torch.Generator().manual_seed(0)
    lower = [torch.full_like(UPPER, low) for low in LOWER] + [torch.randint(0, 2**16, (2**16,), generator=generator)]
    bits = torch.cat([(UPPER << 16) | low for low in lower])
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def test_join_undoes_split_bit_for_bit() -> None:
    master = every_kind()
    back = join_master(*split_master(master))
    numbers = ~master.isnan()
    assert torch.equal(back.view(torch.int32)[numbers], master.view(torch.int32)[numbers])
    assert bool((back.view(torch.int32)[~numbers] == QUIET_NAN_BITS).all())


def test_weight_is_nan_or_infinite_exactly_where_rounding_to_nearest_says_so() -> None:
    master = every_kind()
    weight, _ = split_master(master)
    rounded = master.to(torch.bfloat16)
    assert torch.equal(weight.isnan(), master.isnan())
    assert torch.equal(weight.isinf(), rounded.isinf())


def test_weight_is_the_nearest_bf16_and_ties_go_away_from_zero() -> None:
    master = every_kind()
    master = master[master.isfinite()]
    weight, residue = split_master(master)
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    rounded = master.to(torch.bfloat16)
    assert torch.equal(weight[~tie], rounded[~tie])
    assert bool((residue[tie] == -0x8000).all())
    assert bool((weight[tie].float().abs() > master[tie].abs()).all())


def test_a_bf16_value_has_residue_zero() -> None:
    values = UPPER.to(torch.int16).view(torch.bfloat16)
    values = values[~values.isnan()]
    weight, residue = split_master(values.float())
    assert torch.equal(weight.view(torch.int16), values.view(torch.int16))
    assert not residue.any()


def test_shape_is_kept_and_views_are_taken() -> None:
    master = torch.randn(6, 4).t()
    weight, residue = split_master(master)
    assert weight.shape == residue.shape == (4, 6)
    assert torch.equal(join_master(weight, residue), master)


def check_whole_planes(kernels: Kernels, threads: int) -> None:
    master = every_kind()
    weight, residue = split_master(master)
    got_weight, got_residue = torch.empty_like(weight), torch.empty_like(residue)
    kernels.split(master, got_weight, got_residue, threads=threads)
    assert torch.equal(got_weight.view(torch.int16), weight.view(torch.int16)) and torch.equal(got_residue, residue)
    joined = torch.empty_like(master)
    kernels.join(weight, residue, joined, threads=threads)
    assert torch.equal(joined.view(torch.int32), join_master(weight, residue).view(torch.int32))


def test_kernels_split_and_join_whole_planes_alike() -> None:
    check_whole_planes(ReferenceKernels(), threads=1)
    for threads in (1, 2, 3):
        check_whole_planes(load_kernels(), threads)
