"""A model's parameters under the names of its checkpoints: what ``save_pretrained`` would write, group by group.

What for: an export must load in plain transformers and in everything else that reads the published layout (experts one by one,
not fused), yet never hold the model twice. The mapping that loading used is reverted; per group of parameters that must be
converted together, the tensors are made when the writer comes to the first of them and dropped with the last.

Tied parameters are written once, under the name that the family keeps. Left out: config, tokenizer, and the bytes on the
disk (``store/safetensors_writer.py``). Checked by ``tests/models/test_conversion.py``: names, files and values equal to
``save_pretrained``, logits equal after a reload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerferry.models.conversion import (
    Group,
    GroupBuilder,
    ModelFacts,
    Part,
    Transform,
    convert,
    matching_converter,
    natural_order,
    split_transforms,
)
from layerferry.store.safetensors_writer import TensorToWrite


class SavedCheckpoint:
    """The layout in which ``model`` (whole, maybe on meta) is saved.

    ``used_transforms`` are those of the ``ParameterSource`` that loaded it; None for a model made from its config alone.
    """

    def __init__(self, model: Any, used_transforms: Iterable[Transform] | None = None) -> None:
        self.facts = ModelFacts(model)
        transforms = _default_transforms(model) if used_transforms is None else list(used_transforms)
        reverted = [transform.reverse_transform() for transform in reversed(transforms)]
        self._renamings, converters = split_transforms(reverted)
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        kept = [name for name in self.facts.tensors if name not in ignored and not self._is_alias(name)]
        # Without transforms transformers keeps the model's own order, and the cut into shards follows the order.
        self.names = tuple(natural_order(kept) if transforms else kept)
        """The model's names that are written, one per tensor."""
        self._groups = tuple(self._grouped(converters))

    def entries(
        self, read: Callable[[str], Tensor], dtype: Callable[[str], torch.dtype] | None = None
    ) -> Iterator[TensorToWrite]:
        """What ``write_pretrained`` takes. ``read(name)`` gives a parameter in ``dtype(name)`` (None: the model's own dtype)."""
        for _, tensors, make in self.pieces(read, dtype):
            made = _Made(make)
            yield from (tensor._replace(make=made.maker(tensor.name)) for tensor in tensors)

    def pieces(
        self, read: Callable[[str], Tensor], dtype: Callable[[str], torch.dtype] | None = None
    ) -> Iterator[tuple[tuple[str, ...], list[TensorToWrite], Callable[[], dict[str, Tensor]]]]:
        """``entries`` in groups that depend on nothing else: the model's names that are read, what is written of them, and
        how all of it is made at once."""
        for group in self._groups:
            names = tuple(part.name for part in group.parts)
            make = partial(self._convert, group, read)
            yield names, list(self._entries_of(group, make, dtype or self._own_dtype)), make

    def saved(self, name: str) -> tuple[str, ...]:
        """The checkpoint names that ``name`` (one of ``names``) is part of."""
        group = next(group for group in self._groups if any(part.name == name for part in group.parts))
        make = partial(self._convert, group, self._on_meta)
        return tuple(entry.name for entry in self._entries_of(group, make, self._own_dtype))

    def _entries_of(
        self, group: Group, make: Callable[[], dict[str, Tensor]], dtype: Callable[[str], torch.dtype]
    ) -> Iterator[TensorToWrite]:
        def on_meta(name: str) -> Tensor:
            return torch.empty(self.facts.shape(name), dtype=dtype(name), device="meta")

        outlines = self._convert(group, on_meta)
        for name, outline in outlines.items():
            # Views of one storage count as one piece when transformers cuts shards.
            block = f"{group.first_target} {outline.untyped_storage()._cdata}"
            yield TensorToWrite(name, tuple(outline.shape), outline.dtype, lambda name=name: make()[name], block)  # type: ignore[misc]

    def _convert(self, group: Group, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        tensors = convert(group, read, self.facts)
        if group.converter is None:
            return tensors
        # Renaming comes after the conversion: operations find the full names by the patterns of the converter alone.
        return {self._rename(name): tensor for name, tensor in tensors.items()}

    def _rename(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def _grouped(self, converters: list[Transform]) -> Iterator[Group]:
        builder = GroupBuilder()
        for name in self.names:
            target, pattern = name, None
            for converter in converters:
                target, pattern = converter.rename_source_key(target)
                if pattern is not None:
                    break
            if pattern is None:
                builder.add(self._rename(name), Part(name=name, pattern=name), None)
            else:
                builder.add(target, Part(name=name, pattern=pattern), matching_converter(converters, pattern))
        return builder.groups()

    def _is_alias(self, name: str) -> bool:
        """Whether the tensor is written under another of its names: the first that the family does not call a tied target."""
        others = self.facts.aliases[name]
        homes = [other for other in others if other not in self.facts.tied_targets] or list(others)
        return name != homes[0]

    def _own_dtype(self, name: str) -> torch.dtype:
        return self.facts.tensors[name].dtype

    def _on_meta(self, name: str) -> Tensor:
        return self.facts.tensors[name]


class _Made:
    """The tensors of one group: made for the first that is asked for, each let go when it is taken.

    Only the writer's thread touches it. Asked for again, a tensor is made again.
    """

    def __init__(self, make: Callable[[], dict[str, Tensor]]) -> None:
        self._make = make
        self._tensors: dict[str, Tensor] = {}

    def maker(self, name: str) -> Callable[[], Tensor]:
        return lambda: self._take(name)

    def _take(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors = self._make()
        return self._tensors.pop(name)


def _default_transforms(model: Any) -> list[Transform]:
    """What transformers reverts for a model that no checkpoint filled: its mapping without legacy names and optional prefixes."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    transforms = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in transforms if not isinstance(transform, PrefixChange)]
