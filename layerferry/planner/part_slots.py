"""The slots of parts, filled in the order in which ``engine/feed.py`` fills them: what is uploaded, and when.

Layers are used in an order so regular that their uploads have a closed form; parts of the ends, and of layers' experts, are used
first to last and last to first, and what the slots still hold at each turn is found by playing it. Checked by
``tests/planner/test_time.py`` against the engine's own feed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


def prologue_part(number: int) -> int:
    """What a part of the prologue is called here; part 0 of a whole one is all of it."""
    return -1 - 2 * number


def head_part(number: int) -> int:
    return -2 - 2 * number


@dataclass(slots=True)
class _Slot:
    holds: int | None = None
    claims: int = 0
    last_use: int = -1
    free: float = 0.0


class PartSlots:
    """Slots of one kind, filled in the order in which ``engine/feed.py`` fills them."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._expected: deque[int] = deque()
        self._assigned: deque[_Slot] = deque()
        self._uses = 0

    def expect(self, pieces: Sequence[int]) -> list[tuple[int, float]]:
        """These are used next, in this order -> what is uploaded now, and when its slot was free."""
        self._expected.extend(pieces)
        return self._advance()

    def used(self, now: float) -> list[tuple[int, float]]:
        """The use whose turn it was ends -> what is uploaded now."""
        slot = self._assigned.popleft()
        slot.claims, slot.free = slot.claims - 1, now
        slot.last_use = self._uses
        self._uses += 1
        return self._advance()

    def _advance(self) -> list[tuple[int, float]]:
        begun = []
        while self._expected:
            piece = self._expected[0]
            slot = next((slot for slot in self._slots if slot.holds == piece), None)
            if slot is None:
                idle = [slot for slot in self._slots if not slot.claims]
                if not idle:
                    break
                slot = idle[0] if len(idle) == 1 else self._longest_idle(idle)
                slot.holds = piece
                begun.append((piece, slot.free))
            self._expected.popleft()
            slot.claims += 1
            self._assigned.append(slot)
        return begun

    def _longest_idle(self, idle: Sequence[_Slot]) -> _Slot:
        order = list(self._expected)
        return max(idle, key=lambda slot: (order.index(slot.holds) if slot.holds in order else len(order), -slot.last_use))


def uses_of_ends(num_prologue: int, num_head: int, *, tied: bool, prologue_home: bool, head_home: bool) -> list[int]:
    """What of the ends a training wave feeds, in order; of those at home nothing."""
    first = [prologue_part(number) for number in reversed(range(num_prologue))]
    head = [(prologue_part if tied else head_part)(number) for number in range(num_head)]
    last = [*head, *reversed(head)] if num_head > 1 else head
    return [*([] if prologue_home else first), *([] if head_home else last)]
