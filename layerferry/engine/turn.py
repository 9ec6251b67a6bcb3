"""A unit at the turn: micro-batches come to it again and again, with others in between, until the last one lets it go.

Its slot is taken when the first micro-batch needs it and its sum when the first gradient comes, so that neither is waited for
earlier than must be; both are given back together, the gradient first, as soon as the last micro-batch has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Generic, TypeVar

from layerferry.engine.drain import Drain
from layerferry.engine.feed import Feed, Slot
from layerferry.layout import Plane
from layerferry.units import Unit

T = TypeVar("T")


class Held(Generic[T]):
    """Leaving its context without ``let_go`` is for what has failed."""

    def __init__(
        self, unit: Unit, feed: Feed, drain: Drain, prepare: Callable[[Slot], T], *, carry: bool, sums: Plane | None = None
    ) -> None:
        """``prepare``: what the unit's weights are used as, made once, from its slot. ``sums``: the accumulator, where another
        holds it."""
        self._unit, self._feed, self._drain, self._prepare, self._carry = unit, feed, drain, prepare, carry
        self._ready: T | None = None
        self._sums = sums
        self._taken = ExitStack()

    def __enter__(self) -> Held[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._taken.__exit__(kind, error, trace)

    @contextmanager
    def used(self) -> Iterator[T]:
        """What ``prepare`` has made, for one use."""
        if self._ready is None:
            self._ready = self._prepare(self._taken.enter_context(self._feed.held(self._unit)))
        with self._feed.timed(self._unit):
            yield self._ready

    @property
    def sums(self) -> Plane:
        """The fp32 accumulator @device."""
        if self._sums is None:
            self._sums = self._taken.enter_context(self._drain(self._unit, carry=self._carry))
        return self._sums

    def let_go(self) -> None:
        """The last micro-batch has left: the gradient may travel, and the slot is free."""
        self._taken.close()
