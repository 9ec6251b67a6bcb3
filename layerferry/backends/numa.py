"""Memory nodes: which this process runs on, and pages spread over all of them.

A plane that lies on one node is stepped at that node's bandwidth, however many threads there are; pages that alternate between
nodes give every thread the mean of all, wherever it runs, so threads need no binding. One call to the kernel (``mbind``), no
library. Where it is not allowed (some containers) pages stay where the first touch puts them, and one line says so.
Checked by ``tests/backends/test_numa.py``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import cache
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call."""
_INTERLEAVE = 3
_MOST_NODES = 8 * ctypes.sizeof(ctypes.c_ulong)
NODES = Path("/sys/devices/system/node")

log = logging.getLogger(__name__)


def nodes(root: Path = NODES) -> tuple[int, ...]:
    """Numbers of the nodes that have memory and a core that this process may use; () where the system does not say."""
    allowed = os.sched_getaffinity(0)
    found = []
    for folder in sorted(root.glob("node[0-9]*")):
        try:
            if allowed & _cores((folder / "cpulist").read_text()) and "MemTotal: 0 kB" not in _meminfo(folder):
                found.append(int(folder.name.removeprefix("node")))
        except (OSError, ValueError):
            continue
    return tuple(sorted(found))


@cache
def own_nodes() -> tuple[int, ...]:
    """``nodes`` of this machine, asked once."""
    return nodes()


def spread(address: int, num_bytes: int) -> None:
    """Let the pages from ``address`` on, which nobody has touched, alternate between the nodes; nothing to do for one node."""
    over = own_nodes()
    if len(over) > 1 and not interleave(address, num_bytes, over):
        _say_once()


def interleave(address: int, num_bytes: int, over: tuple[int, ...]) -> bool:
    """Ask the kernel; False where it refuses."""
    number = _MBIND.get(platform.machine())
    if number is None or max(over) >= _MOST_NODES:
        return False
    mask = ctypes.c_ulong(sum(1 << node for node in over))
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    arguments = (address, num_bytes, _INTERLEAVE, ctypes.addressof(mask), _MOST_NODES + 1, 0)
    return bool(call(ctypes.c_long(number), *(ctypes.c_ulong(argument) for argument in arguments)) == 0)


@cache
def _say_once() -> None:
    log.warning("host memory lies on %d nodes and cannot be spread over them: updates may be slower", len(own_nodes()))


def _cores(text: str) -> set[int]:
    """``0-3,8`` -> {0, 1, 2, 3, 8}"""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _meminfo(folder: Path) -> str:
    """One line of blanks, so that ``MemTotal: 0 kB`` is found however it is aligned."""
    return " ".join((folder / "meminfo").read_text().split())
