"""Random numbers without state: fixed values, no dependence on where a span begins, evenly spread, and units apart."""

from __future__ import annotations

import torch

from layerferry.optim.rounding import Rounding, hashed, random_words

CPU = torch.device("cpu")


def key(seed: int = 1, step: int = 2, stream: int = 3) -> Rounding:
    return Rounding.of(seed=seed, step=step, stream=stream)


def test_the_hash_is_lowbias32() -> None:
    """Oracle: the same in Python's integers."""

    def plain(x: int) -> int:
        x ^= x >> 16
        x = x * 0x21F0AAAD & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x735A2D97 & 0xFFFFFFFF
        return x ^ x >> 15

    words = [0, 1, 2**31, 2**32 - 1, 0xDEADBEEF, 12345]
    assert hashed(torch.tensor(words)).tolist() == [plain(word) for word in words]


def test_the_numbers_stay_what_they_are() -> None:
    """A checkpoint of an earlier version goes on with the same ones."""
    assert key() == Rounding(key_low=1498451836, key_high=3456434985)
    assert random_words(key(), 128, 128, CPU)[:3].tolist() == [1346208656, 1052839278, 1874672444]


def test_a_place_has_its_number_wherever_a_span_begins() -> None:
    whole = random_words(key(), 0, 1280, CPU)
    assert torch.equal(random_words(key(), 384, 256, CPU), whole[384:640])
    far = random_words(key(), 128 * (2**33), 128, CPU)
    assert not torch.equal(far, whole[:128]), "the block's upper word counts"


def test_seed_step_and_unit_have_their_own() -> None:
    one = random_words(key(), 0, 4096, CPU)
    for other in (key(seed=2), key(step=3), key(stream=4)):
        assert float((random_words(other, 0, 4096, CPU) == one).float().mean()) < 0.01


def test_every_bit_is_a_fair_coin() -> None:
    """Share of ones in 2**20 numbers: a standard error of 2**-11, five of them; neighbours agree in half of the bits as well."""
    words = random_words(key(), 0, 1 << 20, CPU)
    for bit in range(32):
        ones = (words >> bit) & 1
        assert abs(float(ones.double().mean()) - 0.5) < 5 * 2.0**-11
        assert abs(float((ones[1:] == ones[:-1]).double().mean()) - 0.5) < 5 * 2.0**-11
