"""Memory nodes from a described system, and the kernel's own answer for this one."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import pytest

from layerferry.backends import numa
from layerferry.backends.pages import host_pages


def system(root: Path, *, cores: dict[int, str], empty: tuple[int, ...] = ()) -> Path:
    for number, text in cores.items():
        folder = root / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
        size = 0 if number in empty else 1 << 20
        (folder / "meminfo").write_text(f"Node {number} MemTotal:     {size} kB\nNode {number} MemFree: 7 kB\n")
    return root


def test_nodes_have_memory_and_a_core_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 9, 40})
    cores = {0: "0-7", 1: "8-15,40-47", 2: "16-23", 3: "", 4: "9"}
    assert numa.nodes(system(tmp_path, cores=cores, empty=(4,))) == (0, 1)
    assert numa.nodes(tmp_path / "none") == ()


def test_a_node_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    system(tmp_path, cores={0: "0-1023"})
    (tmp_path / "node1").mkdir()
    assert numa.nodes(tmp_path) == (0,)


def test_the_kernel_takes_the_call() -> None:
    """Asked back with ``get_mempolicy``: the pages alternate between the nodes that were named, here the one there is."""
    own = numa.nodes()
    buffer, _ = host_pages(1 << 20)
    assert own and numa.interleave(buffer.data_ptr(), buffer.numel(), own[:1])
    mode, mask = ctypes.c_int(-1), ctypes.c_ulong(0)
    get = {237: 239, 235: 236}[numa._MBIND[os.uname().machine]]
    arguments = (ctypes.addressof(mode), ctypes.addressof(mask), 65, buffer.data_ptr(), 2)
    assert ctypes.CDLL(None).syscall(ctypes.c_long(get), *(ctypes.c_ulong(one) for one in arguments)) == 0
    assert mode.value == numa._INTERLEAVE and mask.value == 1 << own[0]


def test_what_the_kernel_refuses_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(numa, "own_nodes", lambda: (61, 62))
    numa._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            host_pages(1 << 16)
    assert caplog.text.count("host memory lies on 2 nodes and cannot be spread over them") == 1
    numa._say_once.cache_clear()


def test_one_node_needs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "own_nodes", lambda: (0,))
    monkeypatch.setattr(numa, "interleave", lambda *_: pytest.fail("asked for nothing"))
    host_pages(1 << 16)
