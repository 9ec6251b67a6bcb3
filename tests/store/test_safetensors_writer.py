"""The writer against the safetensors library and the Hugging Face hub's cut into shards; nothing half-written after a failure."""

from __future__ import annotations

import errno
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from layerferry.errors import CheckpointError
from layerferry.store import safetensors_writer
from layerferry.store.safetensors_file import DTYPES, CheckpointFolder
from layerferry.store.safetensors_writer import TensorToWrite, split_into_shards, write_pretrained


def to_write(tensors: dict[str, torch.Tensor]) -> list[TensorToWrite]:
    return [TensorToWrite(name, tuple(tensor.shape), tensor.dtype, returning(tensor)) for name, tensor in tensors.items()]


def returning(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def numbered(count: int) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((10,), float(i)) for i in range(count)}


def test_library_reads_back(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "byte": torch.arange(3, dtype=torch.uint8),
        "wide": torch.randn(5, dtype=torch.float64),
        "brain": torch.randn(4, 4).bfloat16(),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 2),
        "flag": torch.tensor([True, False]),
        "learned": torch.nn.Parameter(torch.ones(2)),
    }
    written = write_pretrained(tmp_path / "new" / "folder", to_write(tensors), metadata={"by": "test"})
    assert written.files == ("model.safetensors",)
    assert written.total_bytes == sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    read = load_file(tmp_path / "new" / "folder" / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    with safe_open(tmp_path / "new" / "folder" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "by": "test"}


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    tensors = {"byte": torch.ones(3, dtype=torch.int8), "half": torch.ones(1).half(), "wide": torch.ones(3, dtype=torch.float64)}
    write_pretrained(tmp_path, to_write(tensors))
    folder = CheckpointFolder(tmp_path)
    assert all(folder.entry(name).begin % tensor.dtype.itemsize == 0 for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values()), key=str), ids=str)
def test_every_dtype_round_trips(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (3 * dtype.itemsize,), dtype=torch.uint8)
    write_pretrained(tmp_path, to_write({"x": raw.view(dtype)}))
    assert torch.equal(CheckpointFolder(tmp_path).read("x").view(torch.uint8), raw)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 60))
def test_shards_are_cut_as_the_hub_cuts(sizes: list[int], bound: int) -> None:
    from huggingface_hub.serialization import split_state_dict_into_shards_factory

    split: Any = split_state_dict_into_shards_factory(
        {str(i): size for i, size in enumerate(sizes)},
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=bound,
    )
    given_tensors = [TensorToWrite(str(i), (size,), torch.uint8, returning(torch.ones(size))) for i, size in enumerate(sizes)]
    ours = [[tensor.name for tensor in shard] for shard in split_into_shards(given_tensors, bound)]
    assert ours == list(split.filename_to_tensors.values())


def test_a_block_is_never_parted() -> None:
    def tensor(name: str, block: str | None) -> TensorToWrite:
        return TensorToWrite(name, (10,), torch.uint8, returning(torch.ones(10)), block)

    given_tensors = [
        tensor("a", None),
        tensor("b0", "b"),
        tensor("b1", "b"),
        tensor("c", None),
        tensor("b2", "b"),
        tensor("d", None),
    ]

    def names(bound: int) -> list[list[str]]:
        return [[tensor.name for tensor in shard] for shard in split_into_shards(given_tensors, bound)]

    assert names(100) == [["a", "b0", "b1", "b2", "c", "d"]]
    assert names(30) == [["a"], ["b0", "b1", "b2"], ["c", "d"]]
    assert names(20) == [["b0", "b1", "b2"], ["a", "c"], ["d"]]


def test_index(tmp_path: Path) -> None:
    tensors = numbered(5)
    written = write_pretrained(tmp_path, to_write(tensors), max_shard_bytes=80, total_parameters=50)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert written.files == (*shards, "model.safetensors.index.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(written.files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200, "total_parameters": 50}
    assert index["weight_map"] == {f"layer.{i}": shards[i // 2] for i in range(5)}
    folder = CheckpointFolder(tmp_path)
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in tensors.items())


def test_earlier_export_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for count, bound in ((5, 80), (2, 10_000), (7, 40), (3, 40)):
        written = write_pretrained(tmp_path, to_write(numbered(count)), max_shard_bytes=bound)
        assert {file.name for file in tmp_path.iterdir()} == {*written.files, "config.json"}
        assert set(CheckpointFolder(tmp_path).names) == set(numbered(count))


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    living: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def make() -> torch.Tensor:
        nonlocal most
        tensor = torch.ones(10)
        living.add(tensor)
        most = max(most, len(living))
        return tensor

    write_pretrained(tmp_path, [TensorToWrite(str(i), (10,), torch.float32, make) for i in range(6)], max_shard_bytes=100)
    assert most == 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("fail_at", range(6))
def test_failed_write_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int, error: int
) -> None:
    write_pretrained(tmp_path, to_write(numbered(5)), max_shard_bytes=80)
    before = content(tmp_path)
    real, calls = safetensors_writer._write_all, 0

    def failing(stream: Any, view: memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls > fail_at:
            real(stream, view[: len(view) // 2])
            raise OSError(error, "No space left on device" if error == errno.ENOSPC else "Input/output error")
        real(stream, view)

    monkeypatch.setattr(safetensors_writer, "_write_all", failing)
    expected = "disk is full" if error == errno.ENOSPC else "Input/output error"
    with pytest.raises(CheckpointError, match=f"{expected}.*untouched"):
        write_pretrained(tmp_path, to_write({f"new.{i}": torch.ones(10) for i in range(4)}), max_shard_bytes=80)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("fail_at", "words"), [(0, "are untouched"), (1, "1 of 3 files are new"), (3, "Every new file is there")]
)
def test_a_failure_among_the_renames_does_not_call_the_folder_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int, words: str
) -> None:
    write_pretrained(tmp_path, to_write(numbered(5)), max_shard_bytes=80)
    real, calls = Path.replace, 0

    def failing(self: Path, target: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > fail_at:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    def broken(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", failing)
    monkeypatch.setattr(safetensors_writer, "_flush_folder", broken)
    with pytest.raises(CheckpointError, match=words):
        write_pretrained(tmp_path, to_write({f"new.{i}": torch.ones(10) for i in range(4)}), max_shard_bytes=80)
    assert not list(tmp_path.glob(".*"))


def test_failure_of_the_maker_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("boom")

    write_pretrained(tmp_path, to_write(numbered(2)))
    before = content(tmp_path)
    with pytest.raises(RuntimeError, match="boom"):
        write_pretrained(tmp_path, [*to_write(numbered(1)), TensorToWrite("late", (2,), torch.float32, broken)])
    assert content(tmp_path) == before


def test_free_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 2**30

    monkeypatch.setattr(safetensors_writer.shutil, "disk_usage", lambda path: Usage)
    huge = TensorToWrite("huge", (2**30,), torch.float32, returning(torch.empty(0)))
    with pytest.raises(CheckpointError, match=r"needs 4\.00 GiB on the disk, 1\.00 GiB free: 3\.00 GiB short"):
        write_pretrained(tmp_path, [huge])
    assert not content(tmp_path)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor"):
        write_pretrained(tmp_path, [])
    with pytest.raises(CheckpointError, match="'x' is to be written twice"):
        write_pretrained(tmp_path, [*to_write({"x": torch.ones(1)}), *to_write({"x": torch.ones(1)})])
    with pytest.raises(CheckpointError, match="complex128"):
        write_pretrained(tmp_path, to_write({"x": torch.ones(1, dtype=torch.complex128)}))
    with pytest.raises(CheckpointError, match=r"'x' was announced as \(2,\) torch.float32, made as \(3,\)"):
        write_pretrained(tmp_path, [("x", (2,), torch.float32, returning(torch.ones(3)))])
    assert not content(tmp_path)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for folder in (file, file / "below"):
        with pytest.raises(CheckpointError, match=r"(File exists|Not a directory); the weights need"):
            write_pretrained(folder, to_write({"a": torch.ones(2)}))
    assert file.read_text() == "x"
