"""``full_determinism``: kernels whose sums have one order, so that a run repeated or resumed under one plan has the same bits.

Order matters where a kernel adds with atomics: on CUDA the gradient of an embedding (``index_add_``), scatters, some attention
backwards. torch has a second kernel for each, or raises an error that names the operation: nothing is silently left as it was.
What the planner chooses is not fixed by it: another plan may add in another order. Checked by
``tests/trainer/test_determinism.py``; on a device by ``tests/gpu/test_engine_cuda.py`` and ``benchmarks/kill_resume.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from layerferry.config import fix_cublas_workspace


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Inside, torch takes deterministic kernels only; enter it before a device is used."""
    fix_cublas_workspace()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)  # strict: under warn_only cuDNN's attention keeps its fast algorithm
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # buffers are written before they are read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
