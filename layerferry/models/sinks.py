"""Attention with sinks by the flash kernels: a learned number per head stands in every softmax's denominator and for no value.

Families with sinks (GPT-OSS) run eagerly in transformers, with T x T scores of every head in memory: torch's kernels know no
sinks. They need not: with the log-sum-exp L over the keys and a sink s, the sum over both is L' = log(e^L + e^s), the output is
the kernel's times e^(L - L'), and the kernel's own backward, given that output and L' in the place of its own, is exact, since
all that it makes of them is the probability e^(score - L') and the dot product of output and gradient. The sink's gradient is
what its probability takes away: minus e^(s - L') times that dot product, summed over queries.

Exact but for roundings: the output is rounded by the kernel and again after e^(L - L'), and as in every flash backward the dot
product is that of the rounded output. Where it matters most of what was tried (later layers of a model at its first, small
weights) the gradients of queries and keys have 1.9 times the error by bf16 products, where a kernel that knew sinks would have
1.5 (docs/log.md). Keeping the kernel's own output as well would save the difference, for as much memory again.

Rows are one sequence of samples, as in ``varlen.py``, whether packed or not: no mask is built, windows are the kernel's.
``work_on`` tries the kernels once on a device against plain products; where they fail, the family stays with transformers'
function. Left out: fp32, for which there is no kernel.

Checked by ``tests/models/test_sinks.py`` (families and algebra, with plain products in the kernels' place),
``tests/engine/test_sinks.py`` (whole steps, in fp32 and in bf16) and ``tests/gpu/test_varlen_cuda.py`` (the kernels).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, library

log = logging.getLogger(__name__)

FAMILIES = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
"""Whose attention is causal, windowed at most, and hands its sinks on as ``s_aux``."""
_TRIAL_ERROR = 0.05
"""Largest relative error in the trial: bf16 has 2**-8 a rounding, and few of them; what is wrong is wrong by far more."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, starts: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention inside samples: query [N, H, d], key and value [N, H', d] bf16 or fp16, sinks [H], starts [S + 1] int32
    -> [N, H, d]."""
    output: Tensor = _with_sinks(query, key, value, sinks.float(), starts, longest, scale, window or 0)[0]
    return output


@library.custom_op("layerferry::with_sinks", mutates_args=())
def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, starts: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp [H, N] fp32 with the sinks in it. ``window`` 0: none."""
    alone, keys = kernel(query.contiguous(), key.contiguous(), value.contiguous(), starts, longest, scale, window)
    both = torch.logaddexp(keys, sinks[:, None])
    share = torch.exp(keys - both).transpose(0, 1).unsqueeze(-1)
    return (alone.float() * share).to(alone.dtype).contiguous(), both.contiguous()


@library.custom_op("layerferry::with_sinks_backward", mutates_args=())
def _with_sinks_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    both: Tensor,
    sinks: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (query.contiguous(), key.contiguous(), value.contiguous())
    by_query, by_key, by_value = kernel_backward(gradient.contiguous(), *inputs, output, both, starts, longest, scale, window)
    taken = torch.exp(sinks[:, None] - both) * (gradient.float() * output.float()).sum(dim=-1).transpose(0, 1)
    return by_query.contiguous(), by_key.contiguous(), by_value.contiguous(), -taken.sum(dim=1)


@_with_sinks.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@_with_sinks_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, both: Tensor, sinks: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    by_query, by_key, by_value = (t.new_empty(t.shape) for t in (query, key, value))
    return by_query, by_key, by_value, torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, starts, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, sinks, starts)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _with_sinks_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return (*found, None, None, None, None)


_with_sinks.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------- torch's kernels


def kernel(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Output [N, H, d] and log-sum-exp [H, N] fp32, without sinks."""
    flash = torch.ops.aten._flash_attention_forward
    found = flash(query, key, value, starts, starts, longest, longest, 0.0, not window, False, scale=scale, **_sides(window))
    return found[0], found[1]


def kernel_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of query, key and value, from any output and log-sum-exp [H, N]."""
    draws = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout that there is not
    spans = (starts, starts, longest, longest)
    flash = torch.ops.aten._flash_attention_backward
    found = flash(gradient, query, key, value, output, lse, *spans, 0.0, not window, draws, draws, scale=scale, **_sides(window))
    return found[0], found[1], found[2]


def _sides(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


# ---------------------------------------------------------------- the trial


@cache
def work_on(device: torch.device, width: int) -> bool:
    """Whether output and gradients by the kernels on ``device`` are those of plain products for heads of ``width``, windowed and
    not: not every card has every width."""
    if device.type != "cuda":
        return False
    try:
        worst = max(_error(device, width, window) for window in (None, 5))
    except (RuntimeError, NotImplementedError, TypeError) as error:  # another device, another torch
        log.warning("attention with sinks runs in plain products: torch's kernels failed (%s)", str(error).splitlines()[0])
        return False
    if worst > _TRIAL_ERROR:
        log.warning("attention with sinks runs in plain products: torch's kernels are off by %.1e here", worst)
    return worst <= _TRIAL_ERROR


def _error(device: torch.device, width: int, window: int | None) -> float:
    """Largest relative difference between kernels in bf16 and products in fp32, over output and gradients."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        found = torch.randn(shape, device=device, generator=generator)
        return found.to(torch.bfloat16).requires_grad_(True)

    query, key, value, sinks = given = random(40, 4, width), random(40, 2, width), random(40, 2, width), random(4)
    gradient = torch.randn(40, 4, width, device=device, generator=generator)
    starts = torch.tensor([0, 16, 40, 40], dtype=torch.int32, device=device)
    output = attend(query, key, value, sinks, starts, 24, width**-0.5, window)
    found = [output, *torch.autograd.grad(output, given, gradient.to(output.dtype))]
    query, key, value, sinks = exact = tuple(one.detach().float().requires_grad_(True) for one in given)
    expected = in_products(query, key, value, sinks, starts, width**-0.5, window)
    reference = [expected.detach(), *torch.autograd.grad(expected, exact, gradient)]
    return max(float((a.detach().float() - b).norm() / b.norm()) for a, b in zip(found, reference, strict=True))


def in_products(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, starts: Tensor, scale: float, window: int | None
) -> Tensor:
    """``attend`` in plain operations, of any dtype on any device."""
    places = torch.arange(len(query), device=query.device)
    sample = torch.searchsorted(starts, places, right=True)
    distance = places[:, None] - places[None, :]
    seen = (distance >= 0) & (distance < (window or len(query))) & (sample[:, None] == sample[None, :])
    groups = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    sink = sinks[:, None, None].expand(-1, len(query), 1)
    shares = torch.cat([scores, sink.to(scores.dtype)], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", shares, values)
