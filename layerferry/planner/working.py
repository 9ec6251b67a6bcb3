"""What a step is made of, and the bytes and seconds of one micro-batch's activations in it: measured (``calibrate.py``) or
estimated (``estimate.py``), counted by ``memory.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerferry.plan import Plan
from layerferry.planner.facts import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a step is made of, whatever the plan."""

    row_tokens: int
    rows_per_step: int
    isolated: bool = False
    """Packed samples that must not see each other: dense masks."""
    packed: bool = False
    evaluates: bool = False
    fused_head: bool = False

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.row_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """One layer, one micro-batch: what its forward leaves; peaks above the level before its forward, and before its backward."""

    kept: int
    forward_peak: int
    backward_peak: int
    waiting_up: int = 0
    """Of experts in parts, what every micro-batch of the wave holds beside its input while they pass. So too on the way down."""
    waiting_down: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Bytes of one micro-batch's activations. ``layers`` by behaviour; ``evaluation_peak`` of the head without gradient."""

    prologue_kept: int
    layers: tuple[LayerBytes, ...]
    head_peak: int
    evaluation_peak: int
    head_kept: int = 0
    """What a micro-batch keeps between the parts of a head that is in parts; ``head_peak`` includes it."""
    router_gradients: int = 0
    """Of the load-balancing loss by router logits: they wait for the layers' backward."""
    workspaces: int = 0
    measured: bool = False
    layer_s: tuple[tuple[float, float], ...] = ()
    """Seconds of (forward, backward) by behaviour, where they were taken with the bytes."""
    others: tuple[tuple[LayerBytes, ...], ...] = ()
    """``layers`` under the further budgets of ``Plan.levels``."""

    def beside(self, others: Sequence[Working]) -> Working:
        """This one, for a plan whose further levels keep what ``others`` do."""
        return replace(
            self,
            others=tuple(other.layers for other in others),
            head_peak=max(self.head_peak, *(other.head_peak for other in others)),
            head_kept=max(self.head_kept, *(other.head_kept for other in others)),
            workspaces=max(self.workspaces, *(other.workspaces for other in others)),
            measured=self.measured and all(other.measured for other in others),
        )

    def of_layers(self, model: Model, plan: Plan) -> list[LayerBytes]:
        """In layer order. Layers below everything that is trained keep nothing: their output takes the place of their input."""
        levels = zip((level.activation_budget for level in plan.levels), (self.layers, *self.others), strict=True)
        by_budget = dict(levels)
        budgets = plan.layer_budgets(model.num_layers)
        layers = [by_budget[budget][behaviour] for budget, behaviour in zip(budgets, model.behaviours, strict=True)]
        below = [replace(one, kept=0, backward_peak=0) for one in layers[: model.num_below]]
        return [*below, *layers[model.num_below :]]

    def times(self, measured: Working, estimated: Working) -> Working:
        """This estimate, each number multiplied by how far ``measured`` was from the ``estimated`` of another shape."""

        def scaled(own: int, truth: int, guess: int) -> int:
            return own if not guess else own * truth // guess

        layers = tuple(
            LayerBytes(
                kept=scaled(own.kept, truth.kept, guess.kept),
                forward_peak=scaled(own.forward_peak, truth.forward_peak, guess.forward_peak),
                backward_peak=scaled(own.backward_peak, truth.backward_peak, guess.backward_peak),
            )
            for own, truth, guess in zip(self.layers, measured.layers, estimated.layers, strict=True)
        )
        return Working(
            prologue_kept=scaled(self.prologue_kept, measured.prologue_kept, estimated.prologue_kept),
            layers=layers,
            head_peak=scaled(self.head_peak, measured.head_peak, estimated.head_peak),
            head_kept=scaled(self.head_kept, measured.head_kept, estimated.head_kept),
            evaluation_peak=scaled(self.evaluation_peak, measured.evaluation_peak, estimated.evaluation_peak),
            router_gradients=scaled(measured.router_gradients, self.prologue_kept, estimated.prologue_kept),
            workspaces=measured.workspaces,
        )


def tokens_of(plan: Plan, shape: Shape) -> int:
    """Tokens of a full micro-batch."""
    return min(plan.micro_batch_rows, shape.rows_per_step) * shape.row_tokens
