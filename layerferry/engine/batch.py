"""The rows of one pass through the layers: what the data pipeline hands to the engine.

Labels are *not* shifted here: ``labels[b, t]`` is the target that LLaMA-Factory and Hugging Face put at position t, with
-100 where the token is not trained; the objective shifts. Padding is on the right, where a causal model never looks, so no
padding mask travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token without loss, as in torch's cross entropy."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows of T tokens @host. ``lengths[b]`` real (unpadded) tokens; ``position_ids`` only where rows are packed.

    ``isolated`` says that samples inside a packed row must not see each other (neat packing): positions restart at each sample.
    """

    input_ids: Tensor  # [B, T] int64 @host
    labels: Tensor  # [B, T] int64 @host
    lengths: Tensor  # [B] int64 @host
    position_ids: Tensor | None = None  # [B, T] int64 @host
    isolated: bool = False

    @cached_property
    def num_targets(self) -> int:
        """Tokens that carry loss once labels are shifted by one: the denominator's share of this micro-batch."""
        return int((self.labels[:, 1:] != IGNORE_INDEX).sum())

    @cached_property
    def num_tokens(self) -> int:
        """Real tokens, padding not counted."""
        return int(self.lengths.sum())
