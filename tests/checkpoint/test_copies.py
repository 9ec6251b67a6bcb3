"""Room for copies: never more bytes than may be spared, or one buffer; buffers are used again; a full room waits."""

from __future__ import annotations

import threading

from layerferry.checkpoint.copies import Room
from tests.checkpoint.test_save import Counting


def test_the_budget_is_kept_and_buffers_are_used_again() -> None:
    backend = Counting()
    room = Room(backend, 1000, largest_bytes=600, travels=False)
    assert room.has(1000) and not room.has(1001)
    first, second = room.take(400), room.take(600)
    taken: list[int] = []
    waiting = threading.Thread(target=lambda: taken.append(room.take(400).data_ptr()))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and backend.asked == 1000
    room.give(first)
    waiting.join(20)
    assert taken == [first.data_ptr()] and backend.asked == 1000
    room.give(second)
    room.take(500)  # another size: the free one goes
    assert backend.asked == 1500


def test_one_piece_is_always_taken_alone() -> None:
    backend = Counting()
    room = Room(backend, 0, largest_bytes=300, travels=True)
    assert not room.has(1)
    first = room.take(200)
    assert first.numel() == 300  # one buffer for all, whatever their sizes
    waiting = threading.Thread(target=lambda: room.take(10))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    room.give(first)
    waiting.join(20)
    assert not waiting.is_alive() and backend.asked == 300
