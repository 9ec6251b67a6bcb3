"""Planes that are @disk, as everybody sees them who has not asked ``Store.at_hand`` for their unit: shapes and types, no bytes.

A tensor on torch's ``meta`` device alone would be a trap: what is written there is lost without a word. So everything but a look
at its shape raises. Checked by ``tests/store/test_away.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LOOKS = frozenset({
    *(Tensor.__getitem__, Tensor.view, Tensor.numel, Tensor.size, Tensor.dim, Tensor.__len__),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
})  # fmt: skip


class AwayError(RuntimeError):
    """State @disk was read or written outside ``Store.at_hand``."""


class AwayTensor(Tensor):
    """Flat bytes that are not here, or a view of them. Made by ``away``."""

    what: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look, or raise."""
        own = next(one for one in (*args, *(kwargs or {}).values()) if isinstance(one, AwayTensor))
        if func not in _LOOKS:
            raise AwayError(f"{own.what} is @disk: it can be read and written inside `with store.at_hand(unit)` only")
        found = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(found, AwayTensor):
            found.what = own.what
        return found


def away(num_bytes: int, what: str) -> AwayTensor:
    """[num_bytes] uint8, of the plane that messages call ``what``."""
    found = torch.empty(num_bytes, dtype=torch.uint8, device="meta").as_subclass(AwayTensor)
    found.what = what
    return found
