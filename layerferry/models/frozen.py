"""``finetuning_type: freeze``: which parameters are trained, by LLaMA-Factory's keys and its way of matching names.

Frozen is torch's own word for it: ``requires_grad`` is off. Whoever reads the model afterwards (units, templates, planner)
asks for nothing else, so a live model whose parameters were frozen by hand is as good. Names are matched as LLaMA-Factory
matches them: ``freeze_trainable_modules`` as the beginning of a name inside a layer, ``freeze_extra_modules`` as a part of any
name. Checked by ``tests/models/test_frozen.py`` against what LLaMA-Factory freezes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from layerferry.config import TrainConfig
from layerferry.errors import ConfigError
from layerferry.models.stack import find_stack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FREEZE = "freeze"
ALL = "all"

log = logging.getLogger(__name__)


def freeze(model: PreTrainedModel, train: TrainConfig) -> None:
    """Freeze what ``train`` does not train. Raises ``ConfigError`` for names that are not there, and where nothing is left."""
    if train.finetuning_type != FREEZE:
        return
    stack, layers = find_stack(model, model.config)
    numbers = trained_layers(train, len(layers))
    names = [name for name, _ in model.named_parameters()]
    trained = _in_layers(names, stack, numbers, train.freeze_trainable_modules)
    trained |= _outside(names, stack, train.freeze_extra_modules, tied=_tied(model))
    if not trained:
        raise ConfigError("freeze_trainable_layers: 0 and no freeze_extra_modules: nothing is left to train")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in trained)


def freeze_alike(model: PreTrainedModel, live: PreTrainedModel) -> None:
    """Freeze what is frozen in ``live``, another instance of the same model."""
    frozen = {name for name, parameter in live.named_parameters() if not parameter.requires_grad}
    if len(frozen) == sum(1 for _ in live.parameters()):
        raise ConfigError("every parameter of the model is frozen: nothing is left to train")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)


def trained_layers(train: TrainConfig, num_layers: int) -> Sequence[int]:
    """The last n layers, the first -n of a negative n, or every (``num_layers`` / n)-th of LLaMA Pro."""
    count = train.freeze_trainable_layers
    if not train.use_llama_pro:
        return range(max(0, num_layers - count), num_layers) if count > 0 else range(min(-count, num_layers))
    if count <= 0 or num_layers % count:
        raise ConfigError(
            f"use_llama_pro: the model has {num_layers} layers, which freeze_trainable_layers: {count} does not divide evenly"
        )
    stride = num_layers // count
    return range(stride - 1, num_layers, stride)


def _in_layers(names: Iterable[str], stack: str, numbers: Sequence[int], modules: Sequence[str]) -> set[str]:
    """Names of the parameters of ``modules`` in the layers ``numbers``."""
    inside = re.compile(rf"{re.escape(stack)}\.(\d+)\.(.+)")
    own = {name: (int(match[1]), match[2]) for name in names if (match := inside.fullmatch(name))}
    known = dict.fromkeys(rest.partition(".")[0] for _, rest in own.values())
    if not modules:
        raise ConfigError(f"freeze_trainable_modules: empty: {ALL}, or some of {', '.join(known)}")
    trained: set[str] = set()
    for module in modules:
        if module != ALL and module not in known:
            raise ConfigError(f"freeze_trainable_modules: no module {module!r} in a layer: {ALL}, or some of {', '.join(known)}")
        start = "" if module == ALL else module
        found = {name for name, (number, rest) in own.items() if number in numbers and rest.startswith(start)}
        if numbers and not found:
            raise ConfigError(f"freeze_trainable_modules: {module}: none of the layers {list(numbers)} has it")
        trained |= found
    return trained


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Last name of a module whose weight is another module's -> that one's."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = name.rpartition(".")[0].rpartition(".")[2]
        if (known := first.setdefault(id(parameter), home)) != home:
            found[home] = known
    return found


def _outside(names: Sequence[str], stack: str, modules: Sequence[str], *, tied: Mapping[str, str]) -> set[str]:
    """Names that ``modules`` match; each must be, or end, the path of a module outside the layers."""
    paths = [name.rpartition(".")[0] for name in names if not name.startswith(f"{stack}.")]
    known = list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    trained: set[str] = set()
    for module in modules:
        home = next((path for path in paths if path == module or path.endswith(f".{module}")), None)
        if home is None:
            shared = f"{module} shares the weight of {tied.get(module)}"
            why = shared if module in tied else f"no module {module!r} outside the layers"
            raise ConfigError(f"freeze_extra_modules: {why}: some of {', '.join(known)}")
        found = {name for name in names if module in name}
        strays = sorted(name for name in found if name.startswith(f"{stack}."))
        if strays:
            log.warning(
                "freeze_extra_modules: %s is also in the names of %d parameters inside the layers (%s ...), which are trained "
                "too, as in LLaMA-Factory; %s is the module outside alone",
                module,
                len(strays),
                strays[0],
                home,
            )
        trained |= found
    return trained
