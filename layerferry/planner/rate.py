"""A number of the machine's, and where it is from."""

from __future__ import annotations

from dataclasses import dataclass

GUESS = "guess"


@dataclass(frozen=True, slots=True)
class Rate:
    """``source``: ``measured``, ``measured in brief``, ``default for ...`` or ``guess``."""

    value: float
    source: str
