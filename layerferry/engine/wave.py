"""The micro-batches that pass the units together, and what each of them leaves on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from layerferry.engine.batch import MicroBatch
from layerferry.engine.router_loss import RouterLoss
from layerferry.engine.tape import SideGradients, Tape
from layerferry.models.embedding import LookUp
from layerferry.models.stack import LayerCall
from layerferry.objectives.base import Objective


@dataclass(slots=True)
class Pass:
    """One micro-batch on its way through the units."""

    micro_batch: MicroBatch
    number: int  # within the step: the same whatever the waves
    hidden: Tensor  # [B, T, D] @device
    calls: list[LayerCall]
    look_ups: list[LookUp] = field(default_factory=list)
    first: GradientEdge | None = None  # the prologue's output in its graph, which need not hold the values
    sides: SideGradients = field(default_factory=SideGradients)
    gradient: Tensor | None = None  # dL/dhidden [B, T, D] @device
    routed: list[Tensor] = field(default_factory=list)  # router logits of an evaluation
    router_gradients: dict[int, list[Tensor]] = field(default_factory=dict)  # unit index -> of each of its routers' logits

    @classmethod
    def of(cls, micro_batch: MicroBatch, number: int, hidden: Tensor, calls: list[LayerCall], look_ups: list[LookUp]) -> Pass:
        """Behind the prologue, whose output is ``hidden`` with its graph."""
        first = get_gradient_edge(hidden) if hidden.requires_grad else None
        return cls(micro_batch, number, hidden.detach(), calls, look_ups, first)

    def leave_head(self) -> None:
        """The last hidden states are nobody's any more, unless the last layer's graph has them."""
        self.hidden = self.hidden.new_empty(0)

    def down_the_prologue(self) -> tuple[list[Tensor | GradientEdge], list[Tensor]]:
        """What the prologue gave, and the gradients by it."""
        assert self.gradient is not None
        live = [(tensor, gradient) for tensor, gradient in self.sides.sums.values() if tensor.requires_grad]
        outputs: list[Tensor | GradientEdge] = [tensor for tensor, _ in live]
        gradients = [gradient for _, gradient in live]
        if self.first is not None:
            outputs, gradients = [self.first, *outputs], [self.gradient, *gradients]
        return outputs, gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """What passes through the units together, and what holds for all of it."""

    micro_batches: Sequence[tuple[int, MicroBatch]]
    """With their numbers within the step: the same whatever the waves."""
    objective: Objective
    denominator: float
    step_seed: int
    tape: Tape
    carry: bool
    """Earlier waves of the step have left gradients to add to."""
    router_loss: RouterLoss | None = None
