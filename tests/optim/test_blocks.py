"""The 8-bit code: what it holds, how far it is off, and that stochastic rounding is right on average."""

from __future__ import annotations

import pytest
import torch

from layerferry.layout import BLOCK_ELEMENTS
from layerferry.optim.blocks import SIGNED_OCTAVES, UNSIGNED_OCTAVES, decode, encode
from layerferry.optim.rounding import Rounding, random_words

KINDS = [(True, SIGNED_OCTAVES), (False, UNSIGNED_OCTAVES)]


def numbers(signed: bool, octaves: float, blocks: int = 64) -> torch.Tensor:
    """Random numbers spread over ``octaves`` below a largest that differs from block to block."""
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(-octaves * torch.rand(blocks * BLOCK_ELEMENTS, generator=generator))
    values *= torch.exp2(torch.linspace(-60, 60, blocks)).repeat_interleave(BLOCK_ELEMENTS)
    signs = torch.randint(0, 2, values.shape, generator=generator) * 2.0 - 1.0
    return values * signs if signed else values


@pytest.mark.parametrize(("signed", "octaves"), KINDS)
def test_nearest_is_within_a_sixteenth(signed: bool, octaves: int) -> None:
    """3 bits of mantissa: half a step is 1/16 of the number. Nothing within the octaves, but for the last, is lost."""
    values = numbers(signed, octaves - 2)
    found = decode(*encode(values, signed=signed), signed=signed)
    assert bool(((found - values).abs() <= values.abs() / 16).all())


@pytest.mark.parametrize(("signed", "octaves"), KINDS)
def test_every_code_comes_back(signed: bool, octaves: int) -> None:
    """All 256 codes under many exponents: decoded numbers are encoded to themselves, with the exponent of their largest."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, BLOCK_ELEMENTS)
    if signed:
        codes[1, 0] = 0  # the negative zero
    for exponent in (0, 1, 77, 255 - octaves - 1):
        exponents = torch.full((2,), exponent, dtype=torch.uint8)
        values = decode(codes.view(-1), exponents, signed=signed)
        assert torch.equal(decode(*encode(values, signed=signed), signed=signed), values)
        for random in (torch.zeros(256, dtype=torch.int64), torch.full((256,), 0xFFFFF)):  # what is exact needs no luck
            assert torch.equal(decode(*encode(values, signed=signed, random=random), signed=signed), values), (
                "exact needs no luck"
            )


@pytest.mark.parametrize(("signed", "octaves"), KINDS)
def test_stochastic_rounding_is_right_on_average(signed: bool, octaves: int) -> None:
    """4,096 draws: the mean of n draws of a step s has a standard error of s / 2 / sqrt(n) at most, with s = value / 8; five of
    them, and the 2**-21 of a step that 20 bits leave."""
    values = numbers(signed, octaves - 2, blocks=1)
    total, draws = torch.zeros_like(values, dtype=torch.float64), 4096
    for step in range(draws):
        random = random_words(Rounding.of(seed=0, step=step, stream=0), 0, BLOCK_ELEMENTS, values.device) & 0xFFFFF
        found = decode(*encode(values, signed=signed, random=random), signed=signed)
        assert bool(((found - values).abs() <= values.abs() / 8).all())
        total += found
    bound = values.abs().double() / 8 * (5 / 2 / draws**0.5 + 2.0**-21)
    assert bool(((total / draws - values).abs() <= bound).all())


def test_a_small_second_moment_is_never_zero() -> None:
    """The update divides by its root: what lies below the 32 octaves becomes the smallest code; zero itself stays zero."""
    values = torch.full((BLOCK_ELEMENTS,), 1e-30)
    values[0], values[1] = 1.0, 0.0
    found = decode(*encode(values, signed=False), signed=False)
    assert found[0] == 1.0 and found[1] == 0.0
    assert bool((found[2:] == 1.125 * 2.0**-31).all())


def test_what_is_far_below_the_largest_first_moment_is_zero() -> None:
    values = torch.full((BLOCK_ELEMENTS,), -1e-6)
    values[0] = 1.0
    found = decode(*encode(values, signed=True), signed=True)
    assert found[0] == 1.0 and not found[1:].any()


@pytest.mark.parametrize("signed", [True, False])
def test_infinity_and_nan_are_kept(signed: bool) -> None:
    values = torch.ones(BLOCK_ELEMENTS)
    values[3], values[4] = float("inf"), float("nan")
    found = decode(*encode(values, signed=signed), signed=signed)
    assert found[3] == float("inf") and bool(found[4].isnan())
