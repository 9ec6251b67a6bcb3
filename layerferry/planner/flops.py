"""Model FLOPs per token, the formula of every benchmark row: ``6 * N_matmul + 6 * L * H * S`` for rows of S tokens.

N_matmul counts the parameters that a token is multiplied with: the layers' matrices and the head (tied or not); of experts
only the chosen ones; not the embedding's look-up, norms, biases or short convolutions. The second term is causal attention:
4*H*S/2 forward and twice that backward, per layer, with H the width of its queries (heads x head size); a sliding window
counts the keys that it sees. Recomputation is not model work and never counted. Frozen matrices have no gradient of their own
(4 * N instead of 6), and what lies below everything that is trained has a forward alone (2 * N, a third of attention).
Checked by ``tests/planner/test_flops.py`` against closed formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from layerferry.models.skeleton import Skeleton

FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """``attention`` is one (width, window) per layer with attention; window None: the whole row.

    The rest is what is not computed because of frozen parameters: ``idle_params`` counts a matrix once if it has no gradient,
    twice if none passes through it either; ``attention_below`` is the part of ``attention`` without backward.
    """

    layer_params: int
    head_params: int
    attention: tuple[tuple[int, int | None], ...]
    idle_params: int = 0
    attention_below: tuple[tuple[int, int | None], ...] = ()
    trains_head: bool = True

    @property
    def matmul_params(self) -> int:
        return self.layer_params + self.head_params

    def per_token(self, row_tokens: float) -> float:
        """Forward and backward of one token in a row of ``row_tokens``."""
        return self.whole(row_tokens) - 2.0 * self.idle_params - 8.0 * _keys(row_tokens, self.attention_below)

    def whole(self, row_tokens: float) -> float:
        """The same if every parameter were trained."""
        return 6.0 * self.matmul_params + 12.0 * _keys(row_tokens, self.attention)

    @property
    def head(self) -> float:
        """Forward and backward of one token in the head's matrix product."""
        return (6.0 if self.trains_head else 4.0) * self.head_params

    @classmethod
    def of(cls, skeleton: Skeleton) -> Flops:
        text = skeleton.config.get_text_config()
        attends = [index for index in range(len(skeleton.layers)) if _attends(text, index)]
        head_params, below = skeleton.vocab_size * skeleton.hidden_size, skeleton.reach.num_below
        trains_head = skeleton.head is None or skeleton.head[0].trained
        idle = 0 if trains_head else head_params
        for index, layer in enumerate(skeleton.layers):
            frozen = active_matmul_params(layer, text, frozen_only=True)
            idle += frozen * (2 if index < below else 1)
        return cls(
            layer_params=sum(active_matmul_params(layer, text) for layer in skeleton.layers),
            head_params=head_params,
            attention=tuple(_attention(text, index) for index in attends),
            idle_params=idle,
            attention_below=tuple(_attention(text, index) for index in attends if index < below),
            trains_head=trains_head,
        )


def flops_per_token(skeleton: Skeleton, row_tokens: float) -> float:
    """Model FLOPs of one token, forward and backward, in rows of ``row_tokens``."""
    return Flops.of(skeleton).per_token(row_tokens)


def _keys(row_tokens: float, attention: tuple[tuple[int, int | None], ...]) -> float:
    return sum(width * _mean_keys(row_tokens, window) for width, window in attention)


def _mean_keys(row_tokens: float, window: int | None) -> float:
    """Mean number of keys that a query sees; S / 2 for a causal row, as usual."""
    if window is None or window >= row_tokens:
        return row_tokens / 2
    return window - window * window / (2 * row_tokens)


def active_matmul_params(layer: nn.Module, text_config: Any, *, frozen_only: bool = False) -> int:
    """Parameters of ``layer`` that one token is multiplied with; of all of them, or of those that are not trained."""
    total = 0.0
    for path, module in layer.named_modules():
        if isinstance(module, (nn.Embedding, nn.Conv1d)):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and not (frozen_only and parameter.requires_grad):
                total += parameter.numel() * _active_share(f"{path}.{leaf}", text_config)
    return round(total)


def _active_share(name: str, text_config: Any) -> float:
    """1, or the chosen share of the experts for a parameter that belongs to them."""
    return chosen_share(text_config) if "experts" in name.split(".") else 1.0


def chosen_share(text_config: Any) -> float:
    """Of a layer's experts, what a token is given to; 1.0 where nothing is chosen."""
    chosen = getattr(text_config, "num_experts_per_tok", None) or getattr(text_config, "top_k_experts", None)
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if chosen and (count := getattr(text_config, key, None)):
            return min(float(chosen) / float(count), 1.0)
    return 1.0


def _kind(text_config: Any, index: int) -> str:
    kinds = getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None)
    return str(kinds[index]) if kinds and index < len(kinds) else ""


def _attends(text_config: Any, index: int) -> bool:
    kind = _kind(text_config, index)
    if kind:
        return "attention" in kind and "linear" not in kind
    return getattr(text_config, "num_attention_heads", None) is not None


def _attention(text_config: Any, index: int) -> tuple[int, int | None]:
    heads = int(text_config.num_attention_heads)
    head_size = getattr(text_config, "head_dim", None) or int(text_config.hidden_size) // heads
    kind = _kind(text_config, index)
    window = getattr(text_config, "sliding_window", None) if "sliding" in kind else None
    return heads * int(head_size), None if window is None else int(window)
