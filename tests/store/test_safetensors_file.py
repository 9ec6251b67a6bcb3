"""The reader against the safetensors library; every kind of broken folder is a CheckpointError that names file and tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from layerferry.errors import CheckpointError
from layerferry.store.safetensors_file import DTYPES, CheckpointFolder, read_header

TENSORS = {
    "embed.weight": torch.arange(24, dtype=torch.float32).view(6, 4),
    "half": torch.randn(3, 5).half(),
    "brain": torch.randn(2, 3, 4).bfloat16(),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "nothing": torch.empty(0, 3),
    "byte": torch.arange(5, dtype=torch.uint8),
}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and bool((a.contiguous().view(-1).view(torch.uint8) == b.contiguous().view(-1).view(torch.uint8)).all())


def write_header(file: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def write_shards(folder: Path) -> None:
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        CheckpointFolder(folder)
    for word in words:
        assert word in str(caught.value)


def test_single_file_equals_library(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = CheckpointFolder(tmp_path)
    assert set(folder.names) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert folder.shape(name) == tuple(tensor.shape) and folder.dtype(name) == tensor.dtype
        assert equal(folder.read(name), tensor)
    with pytest.raises(CheckpointError, match="no tensor 'absent'"):
        folder.read("absent")


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values()) - {torch.complex64}, key=str), ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (4 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    assert equal(CheckpointFolder(tmp_path).read("x"), tensor)


def test_index_and_symlinks(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_shards(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    folder = CheckpointFolder(snapshot)
    assert set(folder.names) == {"a", "b"}
    assert folder.where("b").name == "model-00002-of-00002.safetensors"
    assert equal(folder.read("b"), torch.zeros(3))


def test_read_has_memory_of_its_own(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4)}, tmp_path / "model.safetensors")
    folder = CheckpointFolder(tmp_path)
    folder.read("x").zero_()
    assert equal(folder.read("x"), torch.ones(4))


def test_missing_folder_and_weights(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such folder")
    refused(tmp_path, "no model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pytorch_model.bin", "run code", "save_pretrained")
    save_file({"x": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    refused(tmp_path, "neither model.safetensors nor model.safetensors.index.json")


def test_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "1 of 2 shards are missing", "model-00002-of-00002.safetensors")


def test_truncated_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 5)
    refused(tmp_path, shard.name, "truncated", "'b'", str(size), str(size - 5))
    os.truncate(shard, 20)
    refused(tmp_path, shard.name, "20 bytes")
    os.truncate(shard, 3)
    refused(tmp_path, shard.name, "3 bytes")


def test_file_that_shrinks_after_the_check(tmp_path: Path) -> None:
    save_file({"x": torch.ones(100)}, tmp_path / "model.safetensors")
    folder = CheckpointFolder(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ended inside tensor 'x'"):
        folder.read("x")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        folder.read("x")


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", 3, "a\\b.safetensors"]
)
def test_index_points_outside(tmp_path: Path, file: Any) -> None:
    write_shards(tmp_path)
    write_index(tmp_path, {"a": file})
    refused(tmp_path, "'a'", repr(file))


def test_index_promises(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"})
    refused(tmp_path, "'c'", "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    refused(tmp_path, "index.json", "malformed")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "no weight_map")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "model-00002-of-00002.safetensors")
    refused(tmp_path, "'a' is in both", "model-00001-of-00002.safetensors and model-00002-of-00002.safetensors")


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "malformed"),
        (b"[]", "object is expected"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 50_000, "malformed"),
        (b'{"x": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "x": {}}', "'x' occurs twice"),
        ({"x": 3}, "'x' is not an object"),
        ({"x": {**GOOD, "dtype": "F4"}}, "unknown dtype 'F4'"),
        ({"x": {**GOOD, "dtype": ["F32"]}}, "unknown dtype"),
        ({"x": {**GOOD, "shape": [-2]}}, "shape"),
        ({"x": {**GOOD, "shape": [True, 2]}}, "shape"),
        ({"x": {**GOOD, "shape": "2"}}, "shape"),
        ({"x": {**GOOD, "shape": [2**62, 2**62]}}, "needs"),
        ({"x": {**GOOD, "data_offsets": [0]}}, "data_offsets"),
        ({"x": {**GOOD, "data_offsets": [8, 0]}}, "needs 8 bytes"),
        ({"x": {**GOOD, "data_offsets": [0, 4]}}, "needs 8 bytes"),
        ({"x": {**GOOD, "data_offsets": [4, 12]}}, "gap"),
        ({"x": GOOD, "y": GOOD}, "overlaps"),
        ({"x": {**GOOD, "shape": [1], "data_offsets": [0, 4]}}, "accounts for"),
        ({"x": {**GOOD, "shape": [4], "data_offsets": [0, 16]}}, "truncated"),
    ],
)
def test_broken_headers(tmp_path: Path, header: Any, words: str) -> None:
    file = write_header(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match="model.safetensors") as caught:
        read_header(file)
    assert words in str(caught.value)


_BYTES = save({"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(3).bfloat16()}, metadata={"format": "pt"})


@settings(max_examples=300, deadline=None)
@given(
    position=st.integers(0, len(_BYTES) - 1),
    replacement=st.binary(max_size=6),
    removed=st.integers(0, 6),
    cut=st.one_of(st.none(), st.integers(0, len(_BYTES))),
)
def test_fuzzed_files(
    tmp_path_factory: pytest.TempPathFactory, position: int, replacement: bytes, removed: int, cut: int | None
) -> None:
    """Only CheckpointError; and whatever the library reads, the reader reads alike."""
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    file = folder / "model.safetensors"
    file.write_bytes((_BYTES[:position] + replacement + _BYTES[position + removed :])[:cut])
    try:
        expected = load_file(file)
    except (SafetensorError, ValueError, KeyError, AttributeError):
        expected = None
    try:
        ours = CheckpointFolder(folder)
        read = {name: ours.read(name) for name in ours.names}
    except CheckpointError:
        assert expected is None
        return
    if expected is not None:
        assert read.keys() == expected.keys() and all(equal(read[name], expected[name]) for name in read)


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.one_of(st.sampled_from(sorted(DTYPES)), _JSON),
    shape=_JSON,
    offsets=st.one_of(st.lists(st.integers(-9, 2**70), max_size=3), _JSON),
)
def test_fuzzed_entries(tmp_path_factory: pytest.TempPathFactory, dtype: Any, shape: Any, offsets: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "entry.safetensors"
    write_header(file, {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, bytes(8))
    try:
        entries = read_header(file)
    except CheckpointError:
        return
    assert [entry.num_bytes for entry in entries] == [8]
