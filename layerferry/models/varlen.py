"""Packed rows without a dense mask: variable-length attention through transformers' own interfaces.

Transformers keeps packed samples apart with a mask of T x T per row, which rules out the fast kernels. On a device with
``torch.nn.attention.varlen`` the models that take flash attention's arguments are switched to an attention function of
ours: given the boundaries of the samples it runs the variable-length kernel over all rows as one sequence of samples;
without them it is transformers' SDPA. Attention with sinks goes through ``sinks.py``, with boundaries always. Models whose
attention has soft-caps, chunks, dropout or heads wider than the kernels take keep the mask.

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

from layerferry.layout import round_up
from layerferry.models import sinks
from layerferry.models.attention_outputs import ATTRIBUTE, AttentionOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "layerferry"
NAME_WITH_SINKS = "layerferry_sinks"
BOUNDARIES_MULTIPLE = 64
"""Boundaries are padded to a multiple of this many, so that compiled layers see few shapes."""

WIDEST_HEAD = 256
"""Numbers of a query or key that the flash kernels take at most (Gemma 4 has 512 in some layers)."""
WIDTH_MULTIPLE = 8
"""What theirs is a multiple of: OpenLLaMA-3B has 100."""
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
    return model.config._attn_implementation in (NAME, NAME_WITH_SINKS)


def use_where_possible(model: PreTrainedModel, device: torch.device) -> bool:
    """Switch ``model`` to our attention function if it can run without masks on ``device``; says whether it did."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    has_sinks = any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters())
    if model.config._attn_implementation != ("eager" if has_sinks else "sdpa") or not _needs_no_mask(model):
        return False
    if has_sinks and not _may_have_sinks(model, device):
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    ALL_ATTENTION_FUNCTIONS.register(NAME_WITH_SINKS, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME_WITH_SINKS, _no_mask)
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config._attn_implementation = NAME_WITH_SINKS if has_sinks else NAME
    return True


def _needs_no_mask(model: PreTrainedModel) -> bool:
    """Whether sample boundaries reach its attention, and the kernels are all that its attention does."""
    text = model.config.get_text_config()
    takes_anything = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    able = getattr(model, "_supports_flash_attn", False) and getattr(model, "_supports_attention_backend", False)
    plain = (
        getattr(text, "attn_logit_softcapping", None) is None
        and not _drops_attention(text)
        and set(getattr(text, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}
        and _widest_head(model) <= WIDEST_HEAD
    )
    return takes_anything and able and plain and model.config.model_type not in KEEP_MASKS


def _widest_head(model: PreTrainedModel) -> int:
    """As its attention modules say: configurations have many names for it, and some override it layer by layer."""
    widths = (getattr(module, name, 0) for module in model.modules() for name in ("head_dim", "qk_head_dim"))
    return max(width for width in widths if isinstance(width, int))


def _may_have_sinks(model: PreTrainedModel, device: torch.device) -> bool:
    half = model.dtype in (torch.bfloat16, torch.float16)
    return half and model.config.model_type in sinks.FAMILIES and sinks.work_on(device, _widest_head(model))


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


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Causal and windowed is what the kernels are; padding is on the right (decision 6)."""


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
    functions. The kernels have one width, a multiple of 8: what is narrower, as the values of latent attention are, travels with
    zeros behind it."""
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
    with_sinks: Tensor | None = kwargs.get("s_aux")
    if cu_seq_lens_q is None and with_sinks is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )[0]
        return output
    assert not dropout, "attention dropout has no variable-length kernel"
    rows, heads, tokens, width = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device)
        max_length_q = tokens
    assert max_length_q is not None, "boundaries come with the length of the longest sample"
    value_width, kernel_width = value.shape[-1], round_up(width, WIDTH_MULTIPLE)
    assert value_width <= width, "values wider than keys"
    q, k, v = (_in_one_row(tensor, kernel_width) for tensor in (query, key, value))
    scale, window = width**-0.5 if scaling is None else scaling, kwargs.get("sliding_window")
    if with_sinks is None:
        packed = varlen_kernel(q, k, v, cu_seq_lens_q, max_length_q, scale, window)
    else:
        packed = sinks.attend(q, k, v, with_sinks, cu_seq_lens_q, max_length_q, scale, window)
    return packed.view(rows, tokens, heads, kernel_width)[..., :value_width]


def _in_one_row(states: Tensor, width: int) -> Tensor:
    """[B, H, T, d] -> [B*T, H, width], zeros behind the d numbers of a head: they add nothing to any product."""
    own = states.shape[-1]
    padded = states if own == width else torch.nn.functional.pad(states, (0, width - own))
    return padded.transpose(1, 2).reshape(-1, states.shape[1], width)


def varlen_kernel(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention inside samples: query [N, H, d], key and value [N, H', d], starts [S + 1] int32 -> [N, H, d]."""
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": scale}
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
