"""Files that are truncated, flipped, missing, foreign or swapped: found before a step is taken, whatever file it is."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerferry.checkpoint.checksum import sums_of
from layerferry.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from layerferry.errors import CheckpointError
from tests.checkpoint.tiny import engine_of, load, model_of, save, train

KINDS = ("truncated", "grown", "flipped at the start", "flipped inside", "missing", "emptied", "zeros")


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(num_hidden_layers=1, hidden_size=8, intermediate_size=8)


@pytest.fixture(scope="module")
def whole(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = engine_of(model)
    return save(engine, tmp_path_factory.mktemp("whole"), 0).folder


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return
    if kind == "truncated":
        content = content[: len(content) * 2 // 3]
    elif kind == "grown":
        content += b"\0"
    elif kind == "emptied":
        content = bytearray()
    elif kind == "zeros":
        content = bytearray(len(content))
    else:
        content[0 if "start" in kind else len(content) * 2 // 3] ^= 0x08
    path.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
def test_every_file(model: Any, whole: Path, tmp_path: Path, kind: str) -> None:
    names = sorted(path.name for path in whole.iterdir())
    assert len(names) == 8
    for name in names:
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        damage(folder / name, kind)
        with pytest.raises(CheckpointError, match=name):
            load(model, folder)
    print(f"{kind}: {len(names)} files, all found")


def test_every_byte_of_one_file(whole: Path) -> None:
    """Each byte flipped in turn: the sums see every one."""
    manifest = Manifest.read(whole)
    name = min((name for name in manifest.files if name.startswith("state-")), key=lambda n: manifest.files[n].num_bytes)
    content = (whole / name).read_bytes()
    expected = manifest.files[name].sums
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        assert sums_of(bytes(damaged)) != expected
    print(f"flipped bytes: {len(content)}, all found")


def forged(folder: Path, name: str, content: bytes) -> None:
    """Put ``content`` in place of a file and into the manifest: a checkpoint that sums up and is still wrong."""
    manifest = Manifest.read(folder)
    (folder / name).write_bytes(content)
    files = {**manifest.files, name: FileRecord(num_bytes=len(content), sums=sums_of(content))}
    (folder / MANIFEST).write_bytes(replace(manifest, files=files).to_bytes())


def test_files_that_sum_up_and_do_not_belong(model: Any, whole: Path, tmp_path: Path) -> None:
    names = sorted(name for name in Manifest.read(whole).files if name.startswith("state-"))
    for number, content in enumerate(((whole / names[1]).read_bytes(), b"no safetensors", (0).to_bytes(8, "little") + b"{}")):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        forged(folder, names[0], content)
        with pytest.raises(CheckpointError):
            load(model, folder)


def test_another_optimizer(model: Any, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-0"
    shutil.copytree(whole, folder)
    other = replace(Manifest.read(whole), step=0, state_planes={"momentum": "F32"})
    (folder / MANIFEST).write_bytes(other.to_bytes())
    with pytest.raises(CheckpointError, match="its optimizer kept momentum F32, this run's keeps exp_avg F32, exp_avg_sq F32"):
        load(model, folder)


def test_sizes_of_another_model(whole: Path) -> None:
    with pytest.raises(CheckpointError):
        load(model_of(num_hidden_layers=1, hidden_size=8, intermediate_size=16), whole)


def test_a_disk_that_cannot_be_read(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def broken(*arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    manifest = Manifest.read(whole)
    monkeypatch.setattr(os, "pread", broken)
    with ThreadPoolExecutor(1) as pool, pytest.raises(CheckpointError, match="cannot be read: the disk reports an input/output"):
        manifest.check(whole, pool)


def test_training_from_a_whole_one_still_works(model: Any, whole: Path) -> None:
    assert train(load(model, whole), range(1)) == train(engine_of(model), range(1))


def test_links_are_not_followed_and_the_remedy_works(model: Any, whole: Path, tmp_path: Path) -> None:
    """A folder as the Hugging Face hub's cache keeps it: names that lead to files elsewhere."""
    linked, copy = tmp_path / "checkpoint-0", tmp_path / "copy"
    linked.mkdir()
    for path in whole.iterdir():
        (linked / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match=rf"a link, .*: copy the folder with `cp -rL {linked} COPY`, and name the copy"):
        load(model, linked)
    subprocess.run(["cp", "-rL", linked, copy], check=True)
    load(model, copy)
