"""Host memory for planes: anonymous pages of this process alone, huge where the system gives them, touched by all threads.

Private rather than shared, because of huge pages: Linux gives them to shared anonymous memory only where ``shmem_enabled`` allows
it (by default never), to private memory wherever ``enabled`` says ``always`` or ``madvise``. Measured (``benchmarks/pages.py``,
2 cores): first touch 0.40 against 1.28 s/GiB, every later pass over the bytes 0.30 against 0.48. What shared pages protected
from is kept: no child process inherits these, so a fork leaves each page where the device's copies expect it (private pages
that are inherited are moved by the next write).

On machines with several memory nodes the pages are spread over all of them (``numa.py``), so that the optimizer's threads, which
run on every node, have the bandwidth of all. A buffer is as large as it was asked for; nothing is rounded up but to a page.
Checked by ``tests/backends/test_pages.py``.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from layerferry.backends.numa import spread

_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTFORK")


class Pages(mmap.mmap):
    """Pages of this process, which are unmapped when nobody holds them any more."""

    before_unmapping: Callable[[], object] | None = None
    """Called while they are still there, by whichever thread lets go of them last; not at the end of the interpreter. TRAP: a
    ``weakref.finalize`` is called when they are gone, and somebody else's memory may be there (tests/backends/test_pages.py)."""

    def __del__(self) -> None:
        if self.before_unmapping is not None and not sys.is_finalizing():
            self.before_unmapping()


def host_pages(num_bytes: int) -> tuple[Tensor, Pages]:
    """Zeroed uint8 [num_bytes > 0] @host, from the start of a page, every page touched; and what holds its pages, which goes when
    the last view has gone."""
    pages = _anonymous(num_bytes)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    spread(buffer.data_ptr(), num_bytes)
    return buffer.zero_(), pages  # first touch, in parallel


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory, and no time, while they are only read: all of their pages are the system's one page of zeros.
    ``torch.zeros`` writes each (0.4 s/GiB)."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(_anonymous(max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes].view(dtype).view(tuple(shape))


def _anonymous(num_bytes: int) -> Pages:
    pages = Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for name in _ADVICE:
        if hasattr(mmap, name):
            with suppress(OSError):
                pages.madvise(getattr(mmap, name))
    return pages
