"""The load-balancing loss of mixture-of-experts families, computed by the family's own code.

Hugging Face says which modules' outputs are router logits (``_can_record_outputs``); hooks on a layer's routers collect them
while the layer runs. The loss itself is the family's: its forward runs with a base model that answers with the collected
logits at once, so that its own formula, number of experts and top-k apply. Nothing here knows a family by name.
Asked for by ``output_router_logits: true`` in the config, as in Hugging Face. A family that routes but whose forward adds no
such loss is refused when the config asks. Checked by ``tests/conformance/test_router_loss.py`` against the model's own loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerferry.errors import ModelRefused

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names under which a family's model and config keep the weight of its load-balancing loss."""

log = logging.getLogger(__name__)


def ask_for_balance(config: PretrainedConfig, coefficient: float | None) -> None:
    """``moe_aux_loss_coef``: None leaves the config's own choice, 0 turns the loss off, anything else asks for it."""
    if coefficient is None:
        return
    known = [name for name in COEFFICIENTS if hasattr(config, name)]
    if not known and coefficient:
        log.warning("moe_aux_loss_coef: %s has no load-balancing loss; nothing is added", config.model_type)
        return
    for name in known:
        setattr(config, name, coefficient)
    config.output_router_logits = coefficient != 0


class RouterBalance:
    """The load-balancing loss of one model."""

    def __init__(self, model: PreTrainedModel, recorders: Sequence[Any]) -> None:
        self._model: Any = model
        self._recorders = recorders
        self._head: Any = model.get_output_embeddings()
        self._base: Any = getattr(model, model.base_model_prefix, None)
        self.coefficient = next((float(getattr(model, name)) for name in COEFFICIENTS if hasattr(model, name)), 0.0)

    @classmethod
    def of(cls, model: PreTrainedModel, layers: Sequence[nn.Module]) -> RouterBalance | None:
        """None where the config does not ask, or where nothing routes. ``layers``: taken before stubs replace them."""
        if not getattr(model.config, "output_router_logits", False):
            return None
        balance = cls(model, _router_recorders(model))
        widths = [_num_experts(router) for layer in layers for router, _ in balance._routers(layer)]
        if not widths and not balance.coefficient:
            return None
        balance._refuse_unless_there(widths)
        return balance

    def watch(self, layer: nn.Module) -> list[Tensor]:
        """Hooks on the routers of ``layer``: each call appends its logits to the list that is returned."""
        seen: list[Tensor] = []
        for router, index in self._routers(layer):

            def keep(module: nn.Module, args: Any, output: Any, index: int = index) -> None:
                seen.append(output if isinstance(output, Tensor) else output[index])

            router.register_forward_hook(keep)
        return seen

    def loss(self, logits: Sequence[Tensor], mask: Tensor) -> Tensor:
        """The family's loss [] of ``logits`` (one [B*T, E] per router, in layer order) over tokens whose ``mask`` [B, T] is 1."""
        output = self._own_forward(tuple(logits), mask)
        loss: Tensor = output.aux_loss
        return loss

    def _routers(self, layer: nn.Module) -> Iterator[tuple[nn.Module, int]]:
        for name, module in layer.named_modules():
            for recorder in self._recorders:
                wanted = recorder.target_class is not None and isinstance(module, recorder.target_class)
                if wanted and (recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."):
                    yield module, recorder.index

    def _own_forward(self, logits: tuple[Tensor, ...], mask: Tensor) -> Any:
        answer = _Answer(last_hidden_state=mask.new_zeros((1, 1, 1), dtype=torch.float32), router_logits=logits)
        ids = mask.new_zeros((1, 1), dtype=torch.int64)
        with _forward_of(self._base, lambda *args, **kwargs: answer), _forward_of(self._head, lambda hidden: hidden):
            return self._model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)

    def _refuse_unless_there(self, widths: Sequence[int]) -> None:
        kind = self._model.config.model_type
        reason = (
            f"{kind}: output_router_logits asks for a load-balancing loss, and the family's forward adds none; set it to false"
        )
        if self._base is None or self._head is None or not widths:
            raise ModelRefused(reason)
        trial = tuple(torch.zeros(2, width) for width in widths)
        try:
            found = getattr(self._own_forward(trial, torch.ones(1, 2, dtype=torch.int64)), "aux_loss", None)
        except (AttributeError, TypeError, RuntimeError) as error:  # whatever the family's own code makes of it
            raise ModelRefused(f"{reason} ({error})") from error
        if not isinstance(found, Tensor):
            raise ModelRefused(reason)


class _Answer(SimpleNamespace):
    """A base model's output: what is not there is None."""

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _forward_of(module: nn.Module, stand_in: Any) -> Iterator[None]:
    """``module`` runs ``stand_in`` for a while."""
    own = module.__dict__.get("forward")
    module.forward = stand_in
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _router_recorders(model: nn.Module) -> list[Any]:
    """What transformers says of the modules whose outputs are router logits."""
    found: list[Any] = []
    for module in model.modules():
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for one in recorder if isinstance(recorder, list) else [recorder] if recorder is not None else []:
            full = one if hasattr(one, "target_class") else SimpleNamespace(target_class=one, index=1, layer_name=None)
            if not any(full.target_class is known.target_class for known in found):
                found.append(full)
    return found


def _num_experts(router: nn.Module) -> int:
    """Rows of the router's projection."""
    return next(int(p.shape[0]) for p in router.parameters() if p.dim() == 2)
