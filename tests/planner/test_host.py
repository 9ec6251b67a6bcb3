"""Limits read from written-down system files: the oracle is arithmetic on what the files say."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from layerferry.errors import PlanError
from layerferry.planner.host import (
    CORE_BYTES,
    LIBRARY_BYTES,
    RUN_BYTES,
    check_address_space,
    cores,
    host_limits,
    host_total,
    locked_limit,
)

GIB = 2**30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemFree: 5 kB\nMemAvailable: {48 << 20} kB\nHugePages_Total: 0\n")
    (folder / "self" / "cgroup").write_text("0::/box/job\n")
    (folder / "self" / "statm").write_text("1000 500 0 0 0 0 0\n")
    return folder


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def smallest(proc: Path, groups: Path) -> tuple[int, str]:
    limit = host_limits(proc, groups)[0]
    return limit.num_bytes, limit.source


def test_without_groups_the_kernels_word_counts(proc: Path, tmp_path: Path) -> None:
    assert smallest(proc, tmp_path / "none") == (48 * GIB, "MemAvailable")
    assert host_total(proc) == 64 * GIB


def test_version_2_counts_every_ancestor_and_gives_file_cache_back(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write(groups / "box" / "job", memory__max="max", memory__current=7 * GIB)
    write(groups / "box", memory__max=20 * GIB, memory__current=15 * GIB, memory__stat=f"anon 3\ninactive_file {4 * GIB}")
    assert smallest(proc, groups) == (9 * GIB, "control group box")


def test_version_1_and_its_number_for_no_limit(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n")
    groups = tmp_path / "cgroup"
    write(groups / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    write(groups / "memory" / "job", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=2 * GIB)
    assert smallest(proc, groups) == (4 * GIB, "control group job")


def test_a_container_sees_its_own_group_as_the_root(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/the/hosts/path\n")
    groups = write(tmp_path / "cgroup", memory__max=3 * GIB, memory__current=GIB)
    assert smallest(proc, groups)[0] == 2 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(proc: Path, tmp_path: Path) -> None:
    groups = write(tmp_path / "cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert smallest(proc, groups)[0] == 0


def test_an_address_space_limit_counts(proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries and threads map is not memory for planes; where it leaves nothing, that is said before they are imported."""
    used, beside = 1000 * resource.getpagesize(), RUN_BYTES + CORE_BYTES * len(os.sched_getaffinity(0))
    limit = used + beside + LIBRARY_BYTES
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert smallest(proc, tmp_path / "none") == (LIBRARY_BYTES, "RLIMIT_AS")
    check_address_space(proc)
    limit -= 1
    with pytest.raises(PlanError, match=r"RLIMIT_AS \(ulimit -v\) leaves .* with its threads takes .*ulimit -v unlimited"):
        check_address_space(proc)


def test_cores_are_the_least_of_affinity_and_quotas(proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    groups = tmp_path / "cgroup"
    assert cores(proc, groups) == 12
    write(groups / "box", cpu__max="350000 100000")
    assert cores(proc, groups) == 3
    write(groups / "box", cpu__max="50000 100000")
    assert cores(proc, groups) == 1, "half a core is one thread"
    (proc / "self" / "cgroup").write_text("4:cpu,cpuacct:/job\n")
    write(groups / "cpu" / "job", cpu__cfs_quota_us=800000, cpu__cfs_period_us=100000)
    assert cores(proc, groups) == 8
    write(groups / "cpu" / "job", cpu__cfs_quota_us=-1)
    assert cores(proc, groups) == 12


def test_the_limit_of_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown, not planned with: what a driver pins is not always charged to it."""
    for soft, expected in ((resource.RLIM_INFINITY, None), (65_536, 65_536)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, soft=soft: (soft, soft))
        assert locked_limit() == expected
