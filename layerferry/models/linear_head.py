"""Whether a family's head is a linear map and then, number by number, a scale or soft-cap: found by trying, not looked up.

Then logits of some rows of the vocabulary need nothing of the others, so the head can be computed with a fused kernel
(``objectives/fused_linear.py``) and fed in parts. ``shape_of`` needs no weight: it puts numbers in the place of the linear
module's output, and sees what the family makes of them. Checked by ``tests/models/test_linear_head.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from layerferry.models.skeleton import Skeleton

WIDEST = 128.0
"""Outputs of the head up to this size are tried: those of a new model are so small that a soft-cap does not show."""
_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What follows the linear head: logits * scale, then cap * tanh(logits / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def of(self, output: Tensor) -> Tensor:
        """Logits of the head's ``output``."""
        scaled = output * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def shape_of(skeleton: Skeleton) -> Shape | None:
    """The shape of the model's head, its ends bound to any finite numbers on the CPU; None where it is something else.

    Tried on all of the vocabulary, on half of it, and with other hidden states, which must make no difference.
    """
    module = skeleton.head_module
    if module is None or type(module).forward is not nn.Linear.forward or module._forward_hooks or module._forward_pre_hooks:
        return None
    dtype = module.weight.dtype
    wide = spread(torch.empty(_TOKENS, module.weight.shape[0], dtype=dtype))
    half = wide[:, : max(wide.shape[1] // 2, 1)].contiguous()
    try:
        with torch.no_grad():
            found = [(output, skeleton.after_head(output).float()) for output in (wide, half)]
            other = torch.ones(_TOKENS, skeleton.hidden_size, dtype=dtype)
            if not torch.equal(skeleton.after_head(half, other).float(), found[1][1]):
                return None
    except Exception:  # the family's own code, which may insist on the whole vocabulary
        return None
    for shape in candidates(skeleton.config):
        if all(agree(shape.of(output.float()), logits, dtype) for output, logits in found):
            return shape
    return None


def spread(like: Tensor) -> Tensor:
    """Numbers of every size and sign that a head's output may have, shaped ``like`` a given one."""
    return torch.linspace(-WIDEST, WIDEST, like.numel(), device=like.device).to(like.dtype).view_as(like)


def agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Equal but for the roundings of a few steps, one each, in ``dtype``."""
    if found.shape != expected.shape:
        return False
    tolerance = 2 * torch.finfo(dtype).eps * expected.abs().max()
    return bool(((found - expected).abs() <= tolerance).all())


def candidates(config: Any) -> list[Shape]:
    """Every shape that the numbers of ``config`` can mean."""
    text = config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    scales = [1.0]
    for name in ("logit_scale", "lm_head_multiplier"):
        scales += [float(value)] if isinstance(value := getattr(text, name, None), (int, float)) else []
    if isinstance(divisor := getattr(text, "logits_scaling", None), (int, float)) and divisor:
        scales.append(1.0 / divisor)
    caps = [None] + ([float(cap)] if cap else [])
    return [Shape(scale, limit) for limit in caps for scale in scales]
