"""A tensor's address for C++, after checking what C++ cannot."""

from __future__ import annotations

import torch
from torch import Tensor


def address(tensor: Tensor, dtype: torch.dtype, count: int) -> int:
    """Of ``count`` elements of ``dtype``, contiguous @host."""
    assert tensor.dtype == dtype, f"a kernel got {tensor.dtype} for {dtype}"
    assert tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() == count
    return tensor.data_ptr()
