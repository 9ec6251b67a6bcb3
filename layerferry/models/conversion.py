"""Between the names of a checkpoint and the names of a model: what loading and saving share.

Transformers 5 renames weights on load and fuses some (experts, gate and up projections) through its conversion mapping: a list of
renamings (patterns to names) and converters (patterns to names and tensor operations). Its own loader collects and converts
whole models; we take the mapping only, and run it for one group of tensors at a time. A *group* is what must be
together for one conversion: the parts in the order in which the operations expect them. Nothing here reads a tensor:
shapes are learned by running the operations on ``meta``.

Works with the mapping of transformers 5.17 to 5.24. Checked by ``tests/models/test_conversion.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerferry.errors import CheckpointError

Transform = Any
"""A ``WeightRenaming`` or ``WeightConverter`` of ``transformers.core_model_loading``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor that goes into a conversion, with the pattern of the converter that it matched."""

    name: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors that become others together. Without a converter: one tensor under another name."""

    first_target: str
    converter: Transform | None
    parts: tuple[Part, ...]


class ModelFacts:
    """What conversion operations ask of a model, kept apart from it: the engine replaces the model's layers by stubs."""

    def __init__(self, model: Any) -> None:
        state: dict[str, Tensor] = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        self.config = model.config
        self.base_model_prefix: str = model.base_model_prefix
        self.tensors = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
        self.aliases = _aliases(model, self.tensors)
        self.tied_targets = frozenset(getattr(model, "all_tied_weights_keys", None) or ())

    def get_parameter(self, name: str) -> Tensor:
        """Asked by operations that size their pieces like the model's parameters."""
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


def _aliases(model: Any, tensors: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """All names of the tensor behind each name: one object under several names, or declared tied by the family."""
    sets: dict[str, set[str]] = {name: {name} for name in tensors}

    def join(first: str, second: str) -> None:
        if first in sets and second in sets:
            union = sets[first] | sets[second]
            for name in union:
                sets[name] = union

    seen: dict[int, str] = {}
    for name, value in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        join(seen.setdefault(id(value), name), name)
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        join(source, target)
    return {name: tuple(sorted(names)) for name, names in sets.items()}


def natural_order(names: Iterable[str]) -> list[str]:
    """Sorted as transformers sorts before converting: experts.2 before experts.10."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def split_transforms(transforms: Iterable[Transform]) -> tuple[list[Transform], list[Transform]]:
    """Renamings and converters, each in their order."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    given = list(transforms)
    return (
        [transform for transform in given if isinstance(transform, WeightRenaming)],
        [transform for transform in given if isinstance(transform, WeightConverter)],
    )


def matching_converter(converters: list[Transform], pattern: str) -> Transform:
    """The converter that owns ``pattern``; where two share one the later, as in transformers' own table."""
    return next(converter for converter in reversed(converters) if pattern in converter.source_patterns)


class GroupBuilder:
    """Collects parts under the first name that they make, in the order in which they come."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Part]] = defaultdict(list)
        self._converters: dict[str, Transform | None] = {}

    def add(self, target: str, part: Part, converter: Transform | None) -> None:
        self._converters.setdefault(target, converter)
        self._parts[target].append(part)

    def groups(self) -> Iterator[Group]:
        for target, parts in self._parts.items():
            yield Group(first_target=target, converter=self._converters[target], parts=tuple(parts))


def convert(group: Group, read: Callable[[str], Tensor], facts: ModelFacts) -> dict[str, Tensor]:
    """Run the group's operations on the tensors that ``read`` gives: full name to tensor."""
    if group.converter is None:
        return {group.first_target: read(group.parts[0].name)}
    converter = deepcopy(group.converter)
    for part in group.parts:
        converter.add_tensor(group.first_target, part.name, part.pattern, _bound(read, part.name))
    try:
        made = converter.convert(group.first_target, model=facts, config=facts.config)
    except CheckpointError:
        raise
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
        named = ", ".join(part.name for part in group.parts[:3])
        count = len(group.parts)
        raise CheckpointError(f"{group.first_target}: cannot be made of {count} tensors ({named} ...): {error}") from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _bound(read: Callable[[str], Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: read(name)


def stacked_dim(group: Group) -> int | None:
    """The dimension along which experts' matrices are joined, where the group is the usual fusing of experts; else None.

    One matrix per expert is stacked along a new first dimension, and gate and up are joined along another (0: nothing joined).
    """
    if group.converter is None or len(group.converter.target_patterns) != 1:
        return None
    operations = group.converter.operations
    kinds = [type(operation).__name__ for operation in operations]
    if kinds == ["MergeModulelist"] and operations[0].dim == 0 and len(group.converter.source_patterns) == 1:
        return 0
    if kinds == ["MergeModulelist", "Concatenate"] and operations[0].dim == 0 and operations[1].dim > 0:
        return int(operations[1].dim)
    return None
