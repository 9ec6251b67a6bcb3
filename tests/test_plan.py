"""How bytes are shown in messages: never 0.00 of a unit that is too large."""

from __future__ import annotations

import pytest

from layerferry.plan import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1000 * 1024, "1.0 MiB"),
        (21.5 * 2**20, "21.5 MiB"),
        (100 * 2**20, "0.10 GiB"),
        (3.15 * 2**30, "3.15 GiB"),
        (41.24 * 2**30, "41.2 GiB"),
    ],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text
