"""The manifest as a reader of things from outside: what it writes it reads, and nothing else gets through."""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerferry.checkpoint.checksum import CHUNK_BYTES
from layerferry.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from layerferry.errors import CheckpointError

GOOD = Manifest(
    run="0123456789abcdef",
    line=(("feedfacefeedface", 3), ("cafecafecafecafe", 5)),
    step=7,
    resumable=True,
    state_planes={"exp_avg": "F32"},
    trained=("a", "b"),
    files={"a.safetensors": FileRecord(num_bytes=3, sums=(zlib.crc32(b"abc"),)), "empty": FileRecord(num_bytes=0, sums=())},
    versions={"torch": "2"},
)


def changed(**values: Any) -> Any:
    """The good manifest with other values, and the checksum of those."""
    body = {**json.loads(GOOD.to_bytes()), **values}
    body.pop("crc32")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return {**body, "crc32": zlib.crc32(text.encode())}


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(GOOD.to_bytes())
    assert Manifest.read(tmp_path) == GOOD


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/etc/passwd", "..", ".", ".hidden", "", "a\0b", "a\\b", "x" * 300, "a\nb", "~", "ü", "C:x"]
)
def test_a_name_is_a_name_in_the_folder(name: str) -> None:
    with pytest.raises(CheckpointError, match="files is not as this version writes it"):
        Manifest.parse(changed(files={name: {"bytes": 0, "crc32": []}}), Path("m"))


@pytest.mark.parametrize(
    "values",
    [
        {"step": -1},
        {"step": True},
        {"step": 1.5},
        {"run": "../.."},
        {"run": None},
        {"resumable": 1},
        {"state_planes": {"a": 1}},
        {"trained": "a"},
        {"trained": [1]},
        {"chunk_bytes": CHUNK_BYTES // 2},
        {"files": {"a": {"bytes": 3, "crc32": []}}},
        {"files": {"a": {"bytes": 3, "crc32": [2**32]}}},
        {"files": {"a": {"bytes": "3", "crc32": [1]}}},
        {"files": {"a": {"bytes": 10**30, "crc32": [1]}}},
        {"files": []},
        {"versions": None},
        {"format": 1},
        {"line": None},
        {"line": [["0123456789abcdef"]]},
        {"line": [["0123456789abcdef", -1]]},
        {"line": [["../..", 3]]},
    ],
)
def test_values_that_no_writer_has_written(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        Manifest.parse(changed(**values), Path("m"))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOOD.to_bytes()) * 8 - 1))
def test_every_flipped_bit_is_found(bit: int) -> None:
    """Inside the JSON's meaning: a space that becomes a tab says the same."""
    content = bytearray(GOOD.to_bytes())
    content[bit // 8] ^= 1 << bit % 8
    try:
        value = json.loads(content.decode())
        assert Manifest.parse(value, Path("m")) == GOOD and value == json.loads(GOOD.to_bytes())
    except (CheckpointError, ValueError):
        pass


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["run", "step", "files", "versions", "state_planes", "format"]), json_values))
def test_whatever_json_it_is_only_our_error_comes(values: dict[str, Any]) -> None:
    with contextlib.suppress(CheckpointError):
        Manifest.parse(changed(**values), Path("m"))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_whatever_bytes_it_is_only_our_error_comes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("m")
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError):
        Manifest.read(folder)


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"abc")
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    (folder / "empty").write_bytes(b"")
    (folder / "a.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link, and links are not followed: copy the folder with `cp -rL "):
        GOOD.check_sizes(folder)
