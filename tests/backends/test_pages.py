"""Pages of planes: as many bytes as asked for, zero, huge where the system gives them, and not inherited by a child."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from layerferry.backends.pages import host_pages, untouched_zeros

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _vma(address: int) -> dict[str, str]:
    """The fields of the mapping that has ``address``: mappings of one kind that touch are one."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    heads = ((number, re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) for number, line in enumerate(lines))
    start = next(number for number, found in heads if found and int(found[1], 16) <= address < int(found[2], 16))
    fields = {}
    for line in lines[start + 1 :]:
        name, colon, value = line.partition(":")
        if not colon or "-" in name.split()[0]:
            break
        fields[name] = value.strip()
    return fields


def _untouched_kib(buffer: torch.Tensor) -> int:
    """Of the mapping that has ``buffer``. What the process holds elsewhere does not count; neighbours are touched."""
    fields = _vma(buffer.data_ptr())
    return int(fields["Size"].split()[0]) - int(fields["Rss"].split()[0])


def test_zeroed_and_as_large_as_asked_for() -> None:
    for num_bytes in (1, 4096, 4097, (6 << 20) + 12345):
        buffer, _ = host_pages(num_bytes)
        assert buffer.numel() == num_bytes and not buffer.any() and buffer.data_ptr() % 4096 == 0


def test_a_child_does_not_inherit_them() -> None:
    """The kernel's own flag, and a fork whose parent writes afterwards: the page stays where it was."""
    buffer, _ = host_pages(8 << 20)
    assert "dc" in _vma(buffer.data_ptr())["VmFlags"].split(), "VM_DONTCOPY"
    child = os.fork()
    if not child:
        os._exit(0)
    buffer.fill_(3)
    assert os.waitpid(child, 0)[1] == 0 and int(buffer[-1]) == 3


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_huge_pages_are_asked_for_where_the_kernel_knows_them() -> None:
    buffer, _ = host_pages(16 << 20)
    if ENABLED.exists():
        assert "hg" in _vma(buffer.data_ptr())["VmFlags"].split()


def test_pages_go_with_their_last_view() -> None:
    buffer, pages = host_pages(32 << 20)
    view, address = buffer[5:], f"{buffer.data_ptr():x}-"
    del buffer, pages
    gc.collect()
    assert any(line.startswith(address) for line in Path("/proc/self/maps").read_text().splitlines())
    del view
    gc.collect()
    assert not any(line.startswith(address) for line in Path("/proc/self/maps").read_text().splitlines())


def test_who_is_told_before_pages_are_unmapped_finds_them_there() -> None:
    buffer, pages = host_pages(32 << 20)
    address, there = buffer.data_ptr(), list[bool]()
    pages.before_unmapping = lambda: there.append(is_mapped(address))
    del pages
    gc.collect()
    assert not there
    del buffer
    gc.collect()
    assert there == [True]


def test_untouched_zeros_take_no_memory_while_they_are_read() -> None:
    zeros = untouched_zeros((1 << 14, 1 << 13), torch.bfloat16)
    assert zeros.shape == (1 << 14, 1 << 13) and zeros.dtype == torch.bfloat16 and not zeros.any()
    assert (untouched := _untouched_kib(zeros)) >= 256 << 10, "256 MiB were read"
    zeros[1, 2] = 3.0
    assert untouched - (32 << 10) < _untouched_kib(zeros) < untouched, "one page was written"
    assert float(zeros.sum(dtype=torch.float32)) == 3.0
    assert untouched_zeros((0, 4), torch.float32).shape == (0, 4) and untouched_zeros((), torch.float32).item() == 0.0


RESIDENT = """
import sys, torch
from layerferry.backends.cpu import CpuBackend
from layerferry.backends.pages import host_pages
from layerferry.layout import Layout, ParameterSpec
from layerferry.optim.adamw import AdamW
from layerferry.store.store import Store, plane_specs
from layerferry.units import Unit

class Pages(CpuBackend):
    def host_buffer(self, num_bytes, *, travels):
        return host_pages(num_bytes)[0] if num_bytes else super().host_buffer(0, travels=travels)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

specs = [ParameterSpec(name=f"{i}", shape=(1000, 701), dtype=torch.bfloat16) for i in range(3)]
units = [Unit(name=f"layer.{i}", index=i, layout=Layout.of(specs), names={}, is_layer=True) for i in range(8)]
planes = plane_specs(AdamW().state_planes)
host_pages(1 << 20)
before = resident()
store = Store(units, planes, Pages())
print((resident() - before) / store.num_bytes, store.num_bytes)
"""


def test_resident_bytes_are_those_of_the_plan() -> None:
    """A store of 236 MB in 40 planes: the process grows by what the layouts say, and a page per plane."""
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    share, num_bytes = done.stdout.split()
    assert float(num_bytes) > 200e6 and 0.99 <= float(share) <= 1.02


def test_threads_touch_and_torch_reads_what_was_written() -> None:
    buffer, _ = host_pages(4 << 20)
    floats = buffer.view(torch.float32)
    floats.copy_(torch.arange(floats.numel()))
    assert float(floats.double().sum()) == floats.numel() * (floats.numel() - 1) / 2
