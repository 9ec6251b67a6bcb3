"""Packed rows without a dense mask: variable-length attention through transformers' own interfaces.

Transformers keeps packed samples apart with a mask of T x T per row, which rules out the fast kernels. On a device with
``torch.nn.attention.varlen`` the models that take flash attention's arguments are switched to an attention function of
ours: given the boundaries of the samples it runs the variable-length kernel over all rows as one sequence of samples;
without them it is transformers' SDPA. Models whose attention has sinks, soft-caps, chunks or dropout keep the mask.

Checked by ``tests/models/test_varlen.py`` (the plumbing, with a plain kernel in place of torch's) and
``tests/gpu/test_varlen_cuda.py`` (the kernel).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerferry.models.attention_outputs import ATTRIBUTE, AttentionOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "layerferry"
BOUNDARIES_MULTIPLE = 64
"""Boundaries are padded to a multiple of this many, so that compiled layers see few shapes."""

KEEP_MASKS = ("nemotron",)
"""Families whose layers do not hand the boundaries on to their attention."""

_without_mask: ContextVar[bool] = ContextVar("without_mask", default=False)


def boundaries(position_ids: Tensor) -> Tensor:
    """position_ids [B, T] @host, restarting at 0 with every sample -> [S + 1 + padding] int32 @host: where samples begin in
    B*T tokens."""
    flat = position_ids.flatten()
    starts = torch.nonzero(flat == 0).flatten()
    count = -(-(starts.numel() + 1) // BOUNDARIES_MULTIPLE) * BOUNDARIES_MULTIPLE
    found = torch.full((count,), flat.numel(), dtype=torch.int32)
    found[: starts.numel()] = starts
    return found


def uses_varlen(model: PreTrainedModel) -> bool:
    """Whether its attention is ours."""
    return bool(model.config._attn_implementation == NAME)


def use_where_possible(model: PreTrainedModel) -> bool:
    """Switch ``model`` to our attention function if it can run without masks; says whether it did."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    text = model.config.get_text_config()
    takes_anything = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    plain = (
        getattr(text, "attn_logit_softcapping", None) is None
        and not _drops_attention(text)
        and kinds <= {"full_attention", "sliding_attention"}
        and not any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters())
    )
    plain = plain and model.config.model_type not in KEEP_MASKS
    able = getattr(model, "_supports_flash_attn", False) and getattr(model, "_supports_attention_backend", False)
    if model.config._attn_implementation != "sdpa" or not (takes_anything and plain and able):
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config._attn_implementation = NAME
    return True


def _drops_attention(text: Any) -> bool:
    """Whether attention weights are dropped in training: there is no variable-length kernel that does."""
    return any("att" in name and "drop" in name and bool(value) for name, value in text.to_dict().items())


@contextmanager
def without_mask() -> Iterator[None]:
    """Inside, masks are not built: every layer is given sample boundaries instead."""
    token = _without_mask.set(True)
    try:
        yield
    finally:
        _without_mask.reset(token)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    if _without_mask.get():
        return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, d], key [B, H', T, d], value [B, H', T, v] @device -> ([B, T, H, v], None), as transformers' attention
    functions. Latent attention has v below d: the kernel has one width, so values travel with zeros behind them."""
    options = {"dropout": dropout, "scaling": scaling, "cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q, **kwargs}
    outputs: AttentionOutputs | None = getattr(module, ATTRIBUTE, None)
    if outputs is not None:
        return outputs.call(_attend, module, query, key, value, attention_mask, **options), None
    return _attend(module, query, key, value, attention_mask, **options), None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    cu_seq_lens_q: Tensor | None,
    max_length_q: int | None,
    **kwargs: Any,
) -> Tensor:
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )[0]
        return output
    assert max_length_q is not None and not dropout, "attention dropout has no variable-length kernel"
    rows, heads, tokens, width = query.shape
    value_width = value.shape[-1]
    assert value_width <= width, "values wider than keys"
    if value_width < width:
        value = torch.nn.functional.pad(value, (0, width - value_width))
    q, k, v = (t.transpose(1, 2).reshape(rows * tokens, t.shape[1], width) for t in (query, key, value))
    packed = varlen_kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling, kwargs.get("sliding_window"))
    return packed.view(rows, tokens, heads, width)[..., :value_width]


def varlen_kernel(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention inside samples: query [N, H, d], key and value [N, H', d], starts [S + 1] int32 -> [N, H, d]."""
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if "window_size" in accepted:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        assert window is None, "this torch has no windowed variable-length attention"
        options["is_causal"] = True
    if "enable_gqa" in accepted:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    output = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    assert isinstance(output, Tensor)
    return output
