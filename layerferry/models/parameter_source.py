"""A checkpoint seen through a model's own names: one parameter at a time, never the whole.

What for: planes are filled parameter by parameter. Which checkpoint tensors make a parameter, and how, is decided once from names
and shapes alone; missing, unexpected and misshapen tensors are found before a byte of weights is read.
``load`` then reads only the parts of the one parameter. Values keep the checkpoint's precision: an fp32 or fp8 checkpoint gives
fp32 values for the master, a bf16 one bf16.

Experts are copied one by one into their place, since the generic path (a list of parts, their stack, the join of stacks) would
hold a fused parameter three times. Left out: the way back (``models/saved_checkpoint.py``).
Checked by ``tests/models/test_conversion.py`` against ``from_pretrained``, bit for bit.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor

from layerferry.errors import CheckpointError
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
    stacked_dim,
)
from layerferry.store.safetensors_file import TensorFolder

_LISTED = 5
"""Names that a message lists before it counts the rest."""


class ParameterSource:
    """Parameters and persistent buffers of ``model`` out of ``folder``. ``model`` is whole, and may be on meta.

    Reading is stateless: ``load`` may be called from several threads.
    """

    def __init__(self, model: Any, folder: TensorFolder) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.folder = folder
        self.facts = ModelFacts(model)
        transforms = get_model_conversion_mapping(model)
        self._own: dict[str, Group] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        unexpected = self._resolve(transforms)
        self.used_transforms: list[Transform] = [transform for transform in transforms if transform.was_used()]
        """The part of the mapping that this checkpoint needed: what an export in the same layout reverts."""
        self._check_missing(model)
        _warn_of_unexpected(folder, model, unexpected)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that can be loaded: all parameters and persistent buffers, tied ones under each of their names."""
        return tuple(name for name in self.facts.tensors if self._group(name) is not None)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.facts.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that ``load`` gives: the widest of the parts."""
        dtype = None
        for part in self._needed(name).parts:
            part_dtype = self.folder.dtype(part.name)
            dtype = part_dtype if dtype is None else torch.promote_types(dtype, part_dtype)
        assert dtype is not None
        return dtype

    def num_bytes(self, name: str) -> int:
        """Bytes of the loaded tensor."""
        return self.facts.tensors[name].numel() * self.dtype(name).itemsize

    def parts(self, name: str) -> tuple[str, ...]:
        """The checkpoint tensors that make ``name``."""
        return tuple(part.name for part in self._needed(name).parts)

    def load(self, name: str) -> Tensor:
        """The value of ``name``: the model's shape, the checkpoint's precision, @host, contiguous, memory of its own."""
        group = self._needed(name)
        value = self._run(group, name)
        for alias in self.facts.aliases[name]:
            other = self._own.get(alias)
            if other is not None and other is not group and not torch.equal(value, self._run(other, alias)):
                raise CheckpointError(
                    f"{self.folder.path}: the config ties {name} and {alias}, but the checkpoint has two different tensors. "
                    "Set tie_word_embeddings to false in config.json."
                )
        return value

    def _run(self, group: Group, name: str) -> Tensor:
        target = name if name in self._own and self._own[name] is group else self._named_by(group, name)
        dim = stacked_dim(group)
        if dim is not None:
            return self._stack(group, target, dim)
        return convert(group, self.folder.read, self.facts)[target].contiguous()

    def _named_by(self, group: Group, name: str) -> str:
        return next(alias for alias in self.facts.aliases[name] if self._own.get(alias) is group)

    def _stack(self, group: Group, name: str, dim: int) -> Tensor:
        """Copy each expert's matrix to its place: the parameter and one matrix in memory."""
        made = torch.empty(self.shape(name), dtype=self.dtype(name))
        assert group.converter is not None
        begin = 0
        for pattern in group.converter.source_patterns:
            names = [part.name for part in group.parts if part.pattern == pattern]
            if not names:
                continue
            width = self.folder.shape(names[0])[dim - 1] if dim else 0
            place = made.narrow(dim, begin, width) if dim else made
            for expert, part in enumerate(names):
                place[expert].copy_(self.folder.read(part))
            begin += width
        return made

    def _group(self, name: str) -> Group | None:
        own = self._own.get(name)
        if own is not None:
            return own
        return next((self._own[alias] for alias in self.facts.aliases[name] if alias in self._own), None)

    def _needed(self, name: str) -> Group:
        group = self._group(name) if name in self.facts.aliases else None
        if group is None:
            raise CheckpointError(f"{self.folder.path}: nothing in the checkpoint makes {name}.")
        return group

    def _resolve(self, transforms: list[Transform]) -> list[str]:
        """Sort every checkpoint tensor into the group that needs it; returns the names that nothing needs."""
        from transformers.core_model_loading import rename_source_key

        renamings, converters = split_transforms(transforms)
        prefix, tensors = self.facts.base_model_prefix, self.facts.tensors
        builder = GroupBuilder()
        taken: set[str] = set()
        unexpected: list[str] = []
        for name in natural_order(self.folder.names):
            target, pattern = rename_source_key(name, renamings, converters, prefix, tensors)
            if target not in tensors and name in tensors:
                target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=tensors)
            if target not in tensors or (pattern is None and target in taken):
                unexpected.append(name)
                continue
            taken.add(target)
            converter = None if pattern is None else matching_converter(converters, pattern)
            builder.add(target, Part(name=name, pattern=pattern or name), converter)
        for group in builder.groups():
            self._adopt(group)
        return unexpected

    def _adopt(self, group: Group) -> None:
        """Learn what the group makes by running it on meta, and hold the shapes against the model's."""

        def on_meta(name: str) -> Tensor:
            return torch.empty(self.folder.shape(name), dtype=self.folder.dtype(name), device="meta")

        for name, made in convert(group, on_meta, self.facts).items():
            if name not in self.facts.tensors:
                continue
            if self.facts.tensors[name].is_floating_point() and not made.is_floating_point():
                part = group.parts[0].name
                raise CheckpointError(f"{self.folder.where(part)}: {part} holds {made.dtype}, and {name} is no whole number.")
            if tuple(made.shape) != self.shape(name):
                raise CheckpointError(
                    f"{self.folder.where(group.parts[0].name)}: {name} has shape {tuple(made.shape)} "
                    f"({len(group.parts)} checkpoint tensor{'s' * (len(group.parts) > 1)}, first {group.parts[0].name}), "
                    f"the model's config asks for {self.shape(name)}."
                )
            self._own[name] = group

    def _check_missing(self, model: Any) -> None:
        ignorable = _patterns(getattr(model, "_keys_to_ignore_on_load_missing", None))
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        missing = [
            name
            for name in self.facts.tensors
            if self._group(name) is None and not (name not in parameters and ignorable and ignorable.search(name))
        ]
        if missing:
            raise CheckpointError(
                f"{self.folder.path}: {len(missing)} of the model's {len(self.facts.tensors)} tensors are not in the checkpoint: "
                f"{_listing(missing)}."
            )


def _warn_of_unexpected(folder: TensorFolder, model: Any, unexpected: list[str]) -> None:
    """One warning for checkpoint tensors without a place, less those that are recomputed or that the family declares."""
    declared = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    ignorable = _patterns([*declared, r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"])
    assert ignorable is not None
    left = [name for name in unexpected if not ignorable.search(name)]
    if left:
        text = f"{folder.path}: {len(left)} tensors have no place in the model and are not read: {_listing(left)}."
        warnings.warn(text, stacklevel=3)


def _patterns(patterns: Any) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def _listing(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
