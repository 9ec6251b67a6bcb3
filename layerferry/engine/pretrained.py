"""The model folder: what plain transformers loads, written from the planes one tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerferry.models.saved_checkpoint import SavedCheckpoint
from layerferry.models.skeleton import Skeleton
from layerferry.store.safetensors_writer import TensorToWrite, write_pretrained
from layerferry.store.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIDE_FILES = ("generation_config.json",)


class ModelFolder:
    """How ``model`` is written: made from the whole model, before its layers are taken out."""

    def __init__(self, model: PreTrainedModel, *, source: Path | None, used_transforms: Any = None) -> None:
        self._saved = SavedCheckpoint(model, used_transforms)
        self._config: Any = model.config.__class__.from_dict(model.config.to_dict())
        self._config.architectures = [type(model).__name__]
        self._source = source
        self.tensors_read = 0
        """By ``write`` so far: whether it moves."""

    def write(self, folder: Path, skeleton: Skeleton, store: Store, *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Weights in the dtype that the device computes with (bf16; fp32 in fp32 mode), config and generation config.

        The weights @host must be settled. Raises ``CheckpointError`` when the disk cannot hold them; it says what is then left
        of earlier files.
        """
        stored = reader(skeleton, store)

        def read(name: str) -> Tensor:
            self.tensors_read += 1
            return stored(name)

        entries = self._saved.entries(read, lambda name: read(name).dtype)
        write_pretrained(folder, entries, max_shard_bytes=max_shard_bytes, total_parameters=store.num_params)
        self.write_config(folder, store)

    def pieces(
        self, read: Callable[[str], Tensor]
    ) -> Iterator[tuple[tuple[str, ...], list[TensorToWrite], Callable[[], dict[str, Tensor]]]]:
        """The weights in parts that can be written one by one: model names that ``read`` will be asked for, what they become, and
        how all of it is made at once. ``read`` must know every name's dtype and shape now, its values only when it is made."""
        return self._saved.pieces(read, lambda name: read(name).dtype)

    def write_config(self, folder: Path, store: Store) -> None:
        """Config and generation config."""
        self._config.dtype = store.units[0].layout.entries[0].dtype
        self._config.save_pretrained(folder)
        for name in SIDE_FILES:
            if self._source is not None and (self._source / name).is_file() and self._source.resolve() != folder.resolve():
                shutil.copyfile(self._source / name, folder / name)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """The tokenizer and its chat template; ``OSError`` where the disk does not take them."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the library's own: it tells of a full disk by a bare Exception
        raise OSError(f"the tokenizer cannot be written: {error}") from error


def reader(skeleton: Skeleton, store: Store) -> Callable[[str], Tensor]:
    """Parameters and persistent buffers by model name, views @host where they are planes."""
    homes = {unit.names[entry.name]: (unit, entry) for unit in store.units for entry in unit.layout.entries}

    def read(name: str) -> Tensor:
        if name in homes:
            return store.parameter(*homes[name])
        return skeleton.get_buffer(name).cpu()

    return read
