"""A unit at the turn: micro-batches come to it again and again, with others in between, until the last one lets it go.

Its slot is taken when the first micro-batch needs it and its sum when the first gradient comes, so that neither is waited for
earlier than must be; both are given back together, the gradient first, as soon as the last micro-batch has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from layerferry.engine.drain import Drain
from layerferry.engine.feed import Feed, Slot
from layerferry.layout import Plane
from layerferry.units import Unit


class Held:
    """Leaving its context without ``let_go`` is for what has failed."""

    def __init__(self, unit: Unit, feed: Feed, drain: Drain, *, carry: bool, sums: Plane | None = None) -> None:
        """``sums``: the accumulator, where another holds it."""
        self.unit, self._feed, self._drain, self._carry = unit, feed, drain, carry
        self._slot: Slot | None = None
        self._sums = sums
        self._taken = ExitStack()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._taken.__exit__(kind, error, trace)

    @contextmanager
    def used(self) -> Iterator[Slot]:
        """The slot, for one use."""
        if self._slot is None:
            self._slot = self._taken.enter_context(self._feed.held(self.unit))
        with self._feed.timed(self.unit):
            yield self._slot

    @property
    def sums(self) -> Plane:
        """The fp32 accumulator @device."""
        if self._sums is None:
            self._sums = self._taken.enter_context(self._drain(self.unit, carry=self._carry))
        return self._sums

    def let_go(self) -> None:
        """The last micro-batch has left: the gradient may travel, and the slot is free."""
        self._taken.close()
