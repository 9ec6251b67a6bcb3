"""Random numbers by place, not by order: dropout and sampling routers draw from a generator seeded for (run, step, unit,
micro-batch).

So the numbers do not depend on slots, waves, workers or on whether a run was interrupted, and resume needs no generator state.
"""

from __future__ import annotations

_MASK = (1 << 63) - 1


def seed_of(*parts: int) -> int:
    """A 63-bit seed from whole numbers, by the mixing steps of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        state ^= state >> 31
    return state & _MASK
