"""Do packed samples see each other? Checked on the real layers before the first packed step is trusted.

Attention masks keep samples apart; recurrent state (state-space and linear-attention layers) does not know of them. For
each behaviour the first sample of a packed row is replaced by large noise, and no other sample's output may move by more
than rounding. Otherwise the model is refused for neat packing.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from layerferry.engine.batch import MicroBatch
from layerferry.errors import ModelRefused
from layerferry.models.stack import LayerCall
from layerferry.models.template import Template


class IsolationCheck:
    """Remembers which behaviours have passed."""

    def __init__(self) -> None:
        self._passed: set[Hashable] = set()

    def check(self, template: Template, key: Hashable, micro_batch: MicroBatch, hidden: Tensor, call: LayerCall) -> None:
        """Raise ``ModelRefused`` if the layer lets one packed sample reach another; a behaviour is checked once."""
        if key in self._passed or micro_batch.position_ids is None:
            return
        starts = torch.nonzero(micro_batch.position_ids[0] == 0).flatten()
        if starts.numel() < 2:
            return
        second, end = int(starts[1]), int(micro_batch.lengths[0])
        noisy = hidden.clone()
        generator = torch.Generator(device=hidden.device).manual_seed(0)
        scale = 4 * hidden.float().std() + 1
        noise = torch.randn(hidden[0, :second].shape, generator=generator, device=hidden.device) * scale
        noisy[0, :second] = noise.to(hidden.dtype)
        was_training = template.module.training
        template.module.eval()
        try:
            with torch.no_grad():
                plain = template(hidden, call.args, call.kwargs, call)[0, second:end].float()
                moved = template(noisy, call.args, call.kwargs, call)[0, second:end].float()
        finally:
            template.module.train(was_training)
        drift = float((plain - moved).norm() / (plain.norm() + 1e-30))
        if drift > 1e-3:
            raise ModelRefused(
                f"neat_packing: a sample changes what {type(template.module).__name__} computes for its neighbour by {drift:.1%} "
                "(state that runs on along the row); use packing: false for this model"
            )
        self._passed.add(key)
