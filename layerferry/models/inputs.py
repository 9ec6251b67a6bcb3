"""One micro-batch on the device, in the words of a model's forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """One micro-batch @device, as the model's forward takes it."""

    input_ids: Tensor  # [B, T] int64 @device
    position_ids: Tensor | None = None  # [B, T] int64 @device; restarts at each packed sample
    attention_mask: Tensor | None = None  # [B, T] int64 @device
    boundaries: Tensor | None = None  # [S + 1 + padding] int32 @device; where packed samples begin in B*T tokens

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        given = {"input_ids": self.input_ids, "position_ids": self.position_ids, "attention_mask": self.attention_mask}
        found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.boundaries is not None:
            longest = self.input_ids.shape[1]
            found |= {"cu_seq_lens_q": self.boundaries, "cu_seq_lens_k": self.boundaries}
            found |= {"max_length_q": longest, "max_length_k": longest}
        return found
