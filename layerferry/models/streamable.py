"""What the parameters of a model must be for its layers to be streamed: each of one layer, and there at all.

Checked by ``tests/models/test_skeleton.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerferry.errors import ModelRefused

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def refuse_unstreamable(model: PreTrainedModel, stack_name: str) -> None:
    """Raise ``ModelRefused``, by name, for a parameter that layers share with each other or with the ends, or that has no
    elements. ``stack_name``: of the list of layers."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.numel():
            shape = tuple(parameter.shape)
            raise ModelRefused(f"{model.config.model_type}: {name} has no elements {shape}: a size in the model's config is 0")
        inside = name.startswith(f"{stack_name}.")
        home = name[len(stack_name) + 1 :].partition(".")[0] if inside else "ends"
        known = owners.setdefault(id(parameter), home)
        if known != home:
            raise ModelRefused(
                f"{model.config.model_type}: {name} is shared between layers {known} and {home}; they cannot be streamed alone"
            )
