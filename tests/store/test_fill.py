"""Order, memory and refusals of loading parameter by parameter."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layerferry.errors import CheckpointError
from layerferry.store.fill import check_finite, fill


class Counted:
    """A source that counts the bytes of its tensors that are alive."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.live_bytes = 0
        self.most_bytes = 0
        self.lock = threading.Lock()

    def num_bytes(self, name: str) -> int:
        return self.sizes[name]

    def load(self, name: str) -> torch.Tensor:
        tensor = torch.full((self.sizes[name] // 4,), float(len(name)))
        with self.lock:
            self.live_bytes += self.sizes[name]
            self.most_bytes = max(self.most_bytes, self.live_bytes)
        weakref.finalize(tensor, self._gone, self.sizes[name])
        return tensor

    def _gone(self, num_bytes: int) -> None:
        with self.lock:
            self.live_bytes -= num_bytes


@pytest.mark.parametrize("read_ahead_bytes", [0, 400, 10**9])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_order_progress_and_memory(read_ahead_bytes: int, num_threads: int) -> None:
    source = Counted({"a" * i: 40 * i for i in range(1, 15)})
    names = list(reversed(source.sizes))
    seen: list[str] = []
    steps: list[tuple[str, int, int]] = []

    def set_parameter(name: str, value: torch.Tensor) -> None:
        assert value.numel() == 10 * len(name) and bool((value == len(name)).all())
        seen.append(name)

    fill(
        set_parameter,
        source,
        iter(names),
        read_ahead_bytes=read_ahead_bytes,
        num_threads=num_threads,
        progress=lambda name, done, total: steps.append((name, done, total)),
    )
    assert seen == names == [name for name, _, _ in steps]
    total = sum(source.sizes.values())
    assert [done for _, done, _ in steps] == [sum(source.sizes[name] for name in names[: i + 1]) for i in range(len(names))]
    assert {step[2] for step in steps} == {total}
    assert source.live_bytes == 0
    # At any time: what may fly, or the one parameter that is larger than that.
    assert source.most_bytes <= max(read_ahead_bytes, max(source.sizes.values()))


def test_reader_error_ends_it(tmp_path: Path) -> None:
    class Broken(Counted):
        def load(self, name: str) -> torch.Tensor:
            if name == "bb":
                raise CheckpointError("file x: tensor bb")
            return super().load(name)

    seen: list[str] = []
    with pytest.raises(CheckpointError, match="tensor bb"):
        fill(lambda name, value: seen.append(name), Broken({"a": 4, "bb": 4, "ccc": 4}), ["a", "bb", "ccc"])
    assert seen == ["a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_not_finite_is_refused(dtype: torch.dtype, bad: float, place: int) -> None:
    value = torch.linspace(-3, 3, 1000, dtype=torch.float32).to(dtype)
    check_finite("fine", value)
    value[place] = bad
    with pytest.raises(CheckpointError, match=r"layers\.3\.weight: the checkpoint has inf or NaN"):
        check_finite("layers.3.weight", value)


def test_integers_and_empty_tensors_pass() -> None:
    check_finite("count", torch.tensor([1, 2]))
    check_finite("nothing", torch.empty(0))


_PROGRAM = """
import resource, sys, torch
from layerferry.store.fill import fill
from layerferry.store.safetensors_file import CheckpointFolder

class Source:
    def __init__(self, folder): self.folder, self.load = folder, folder.read
    def num_bytes(self, name): return self.folder.entry(name).num_bytes

folder = CheckpointFolder(sys.argv[1])
fill(lambda name, value: None, Source(folder), folder.names[:1], read_ahead_bytes=0)  # threads and buffers of the first use
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fill(lambda name, value: None, Source(folder), folder.names, read_ahead_bytes=int(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, len(folder.names))
"""


def test_resident_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """192 MiB in tensors of 8 MiB, 16 MiB in flight: the process's peak grows by what is in flight, not by the file."""
    save_file({f"w{i}": torch.randn(2 * 2**20) for i in range(24)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path), str(2**24)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown_bytes, count = map(int, done.stdout.split())
    assert count == 24
    # In flight 16 MiB; as much again that the allocator has not yet given back, and one tensor for the arenas of the threads.
    assert grown_bytes <= 2 * 2**24 + 2**23
