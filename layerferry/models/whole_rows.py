"""Tells transformers that no row holds several samples, which it would else read from the device.

To build a mask, every forward asks whether position ids run on from 0 (``find_packed_sequence_indices``), in a tensor @device:
the host waits for all that the device still has to do, twice a micro-batch. Where we give no position ids there is nothing to
ask. There is no argument that says so, hence the function is replaced, by itself wherever nothing is said. Checked by
``tests/engine/test_host_reads.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_rows_are_whole: ContextVar[bool] = ContextVar("rows_are_whole", default=False)


@contextmanager
def whole_rows() -> Iterator[None]:
    """Inside, every row is one sample, and transformers does not look."""
    _teach()
    token = _rows_are_whole.set(True)
    try:
        yield
    finally:
        _rows_are_whole.reset(token)


@functools.cache
def _teach() -> None:
    from transformers import masking_utils

    look = getattr(masking_utils, "find_packed_sequence_indices", None)
    if look is None:
        return  # a version that does not ask

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        found: Tensor | None = None if _rows_are_whole.get() else look(position_ids)
        return found

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
