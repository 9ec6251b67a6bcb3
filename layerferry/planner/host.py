"""What this process may use of the host: memory by every limit that can end it, and cores.

The smallest of: what the kernel says is available, the control groups' limits (version 1 and 2, every ancestor) minus what is
used there, and RLIMIT_AS. File cache that a group could give back counts as free; of address space, what libraries and threads
map is set aside, for it is far more than they use. Some virtual machines report a small total that grows as it is touched:
``host_memory:`` overrides. Roots are arguments, so that tests read fixture trees. Checked by ``tests/planner/test_host.py``.
"""

from __future__ import annotations

import errno
import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from layerferry.errors import PlanError
from layerferry.plan import size_text

LIBRARY_BYTES = 1 << 30
"""Address space that torch and transformers take when they are imported (0.9 GiB seen)."""
RUN_BYTES, CORE_BYTES = 1 << 30, 72 << 20
"""And what a run takes beyond the plan (0.6 to 1.1 GiB seen on two cores): a thread has a stack of 8 MiB and an arena of 64."""
ADDRESS_SPACE = "RLIMIT_AS"
LIFT = "`ulimit -v unlimited` lifts RLIMIT_AS"

_OUT_OF_SPACE = ("allocate memory", "start new thread", "create a primitive", "failed to map segment", "std::bad_alloc")
"""What libraries say where a mapping fails."""
_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a huge number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Bytes that may still be taken, and who says so."""

    num_bytes: int
    source: str


def host_limits(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> list[Limit]:
    """Every limit that is known, smallest first."""
    found = [Limit(num_bytes=_meminfo(proc)["MemAvailable"], source="MemAvailable")]
    found += _group_limits(proc, groups)
    space = _address_space(proc)
    if space is not None:
        found.append(Limit(num_bytes=max(space - _set_aside(), 0), source=ADDRESS_SPACE))
    return sorted(found, key=lambda limit: limit.num_bytes)


def check_address_space(proc: Path = Path("/proc")) -> None:
    """``PlanError`` where RLIMIT_AS has no room for the libraries alone: they would end in anything, a crash included."""
    space, needed = _address_space(proc), LIBRARY_BYTES + _set_aside()
    if space is not None and space < needed:
        raise PlanError(
            f"RLIMIT_AS (ulimit -v) leaves {size_text(space)} of address space, and PyTorch with its threads takes "
            f"{size_text(needed)} before any model: {LIFT}"
        )


def address_space_told(error: Exception) -> str | None:
    """One line where ``error`` is that RLIMIT_AS has no more room; None: it is another matter."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    text = " ".join(str(error).split())
    of_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not of_memory and not any(words in text for words in _OUT_OF_SPACE):
        return None
    return f"out of address space: RLIMIT_AS (ulimit -v) is {size_text(soft)}: {LIFT} ({text or type(error).__name__})"


def _address_space(proc: Path) -> int | None:
    """Bytes that may still be mapped; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    used = int((proc / "self" / "statm").read_text().split()[0]) * resource.getpagesize()
    return max(int(soft) - used, 0)


def _set_aside() -> int:
    """Address space that no plan counts."""
    return RUN_BYTES + CORE_BYTES * len(os.sched_getaffinity(0))


def host_total(proc: Path = Path("/proc")) -> int:
    return _meminfo(proc)["MemTotal"]


def locked_limit() -> int | None:
    """RLIMIT_MEMLOCK in bytes, None where there is none. Pinning by a driver does not always count against it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def cores(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole cores that this process may keep busy: its affinity, or a control group's quota where that is less."""
    quotas = [quota for folder in _group_folders(proc, groups, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, math.floor(min([len(os.sched_getaffinity(0)), *quotas])))


def _meminfo(proc: Path) -> dict[str, int]:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}


def _group_limits(proc: Path, groups: Path) -> Iterator[Limit]:
    for folder in _group_folders(proc, groups, "memory"):
        for limit_name, usage_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                cache = _reclaimable(folder)
                yield Limit(num_bytes=max(limit - max(usage - cache, 0), 0), source=f"control group {folder.name or '/'}")


def _reclaimable(folder: Path) -> int:
    """File cache that the group gives back under pressure."""
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _group_folders(proc: Path, groups: Path, controller: str) -> Iterator[Path]:
    """The process's group of ``controller`` and its ancestors, as far as they can be seen from here."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        for root in (groups,) if not names else (groups / controller, groups / names):
            folder = root / path.lstrip("/")
            # inside a container the path may be the host's and not exist here: the root is then our own group
            for candidate in [folder, *folder.parents]:
                if candidate.is_dir() and candidate.is_relative_to(root):
                    yield candidate


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _cpu_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None
