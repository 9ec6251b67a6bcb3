"""Plain products in the place of torch's flash kernels, which run on devices only: they know no sinks, and their backward takes
any output and log-sum-exp, as the kernels' does.

In bf16 they round where the kernels round: scores and sums are fp32; probabilities (before they are divided by their sum), the
gradient of scores and every head's share of the keys' and values' gradients are rounded before the product or sum that follows;
and the dot product of output and gradient is taken of the rounded output. In fp32 nothing is rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerferry.models import sinks


def scores(query: Tensor, key: Tensor, starts: Tensor, scale: float, window: int) -> Tensor:
    """[H, N, N] fp32, minus infinity where nothing is seen."""
    number = torch.arange(len(query), device=query.device)
    sample = torch.searchsorted(starts, number, right=True)
    distance = number[:, None] - number[None, :]
    seen = (distance >= 0) & (distance < (window or len(query))) & (sample[:, None] == sample[None, :])
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return (torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * scale).masked_fill(~seen, float("-inf"))


def plain_kernel(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0, "what flash kernels take"
    found = scores(query, key, starts, scale, window)
    shares = torch.exp(found - found.amax(-1, keepdim=True))
    values = value.float().repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    output = torch.einsum("hqk,khd->qhd", _rounded(shares, value), values) / shares.sum(-1).transpose(0, 1).unsqueeze(-1)
    return output.to(query.dtype), found.logsumexp(-1)


def plain_backward(
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
    """Dao et al., arXiv 2205.14135, algorithm 4, in one block."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (t.float().repeat_interleave(groups, dim=1) for t in (key, value))
    shares = torch.exp(scores(query, key, starts, scale, window) - lse[..., None])
    by_share = torch.einsum("qhd,khd->hqk", gradient.float(), values)
    dots = (gradient.float() * output.float()).sum(-1).transpose(0, 1)
    by_score = _rounded(shares * (by_share - dots[..., None]), query)
    by_query = torch.einsum("hqk,khd->qhd", by_score, keys) * scale
    by_key = torch.einsum("hqk,qhd->khd", by_score, query.float()) * scale
    by_value = torch.einsum("hqk,qhd->khd", _rounded(shares, value), gradient.float())
    by_key, by_value = (_rounded(t, key).unflatten(1, (-1, groups)).sum(2) for t in (by_key, by_value))
    return by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype)


def _rounded(values: Tensor, like: Tensor) -> Tensor:
    """fp32 -> fp32, as the type of ``like`` holds them."""
    return values.to(like.dtype).float()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "kernel", plain_kernel)
    monkeypatch.setattr(sinks, "kernel_backward", plain_backward)
    monkeypatch.setattr(sinks, "work_on", lambda device, width: True)
