"""Do packed samples see each other? Checked on the real layers before the first packed step is trusted.

Attention masks keep samples apart; recurrent state and convolutions (state-space, linear-attention, short-convolution
layers) do not know of them. For each behaviour the gradient of what a layer computes for later samples of a packed row is
taken by the first sample's hidden states: it is zero in every bit where samples are kept apart, whatever the weights, and
otherwise the model is refused for neat packing. Checked by ``tests/engine/test_packing.py``.
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
        found = _later_samples(micro_batch.position_ids, micro_batch.lengths)
        if found is None:
            return
        row, second, end = found
        leaf = hidden.detach().requires_grad_(True)
        with torch.enable_grad():
            later = template(leaf, call.args, call.kwargs, call)[row, second:end]
        generator = torch.Generator(device=hidden.device).manual_seed(0)
        slope = torch.randn(later.shape, generator=generator, device=later.device).to(later.dtype)
        (gradient,) = torch.autograd.grad(later, leaf, slope)
        if bool(gradient[row, :second].any()):
            raise ModelRefused(
                f"neat_packing: in {type(template.module).__name__} a sample reaches its neighbour (state that runs on along "
                "the row, or a mask that does not know of samples); use neat_packing: false for this model"
            )
        self._passed.add(key)


def _later_samples(position_ids: Tensor, lengths: Tensor) -> tuple[int, int, int] | None:
    """Row, start and end of what follows the first sample, in the first row that has more than one."""
    for row, length in enumerate(lengths.tolist()):
        starts = torch.nonzero(position_ids[row, :length] == 0).flatten()
        if starts.numel() > 1:
            return row, int(starts[1]), length
    return None
