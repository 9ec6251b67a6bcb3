"""What an optimizer is to the rest of the house: the planes it keeps, and an update of one unit from its gradient.

An optimizer owns no memory. The store keeps its state as planes of the unit (named here, so that the plan can count their bytes),
and a step reads and writes planes in place. Everything that changes from step to step is in ``StepHyper``, a value: a
deferred step carries the learning rate, step number and clip coefficient of the moment it was deferred.
Leaves out: when a step runs and on which thread (``engine``), the learning rate itself (``optim/schedule.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from layerferry.layout import Layout, Plane, PlaneSpec

if TYPE_CHECKING:
    from layerferry.optim.orthogonal import Stack

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHyper:
    """What one optimizer step of the whole model shares; captured when the step is deferred."""

    lr: float
    """Learning rate of this step."""
    step: int
    """Number of this step, counted from 1: the power of the bias corrections."""
    grad_scale: float = 1.0
    """Factor on every gradient: the clip coefficient (and whatever else the gradients were left multiplied by)."""
    stream: int = 0
    """Tells one unit's random numbers from another's; set by whoever steps a unit."""


class Optimizer(Protocol):
    """An update rule over planes."""

    @property
    def state_planes(self) -> Mapping[str, PlaneSpec]:
        """Planes that the optimizer keeps per unit, all zero before the first step; the residue among them where the master is
        kept in fewer bits than fp32 has."""

    def bytes_per_param(self) -> float:
        """Bytes of the moments per parameter; weight, residue and gradient are not counted."""

    def step(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """Update every span of one unit in place.

        ``planes`` has ``weight``, ``grad``, every state plane, and ``residue`` where the layout has a bf16 section, all at one
        place. Padding stays zero. The result does not depend on ``threads``.
        """


@runtime_checkable
class StagedOptimizer(Optimizer, Protocol):
    """An ``Optimizer`` whose update of matrices has a middle that belongs on the device, wherever the planes live.

    ``step`` does all of it where the planes are. In stages: ``prepare`` leaves in the gradient plane what the device is to work
    on, and steps whatever has no middle; ``orthogonalise`` does the middle, stack by stack (``orthogonal.stacks_of``); ``finish``
    takes the results from the gradient plane. The three together have the bits of ``step`` with the middle @device.
    """

    def prepare(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See the class; all planes at one place, as of ``step``."""

    def orthogonalise(self, stack: Stack, values: Tensor, workspace: Tensor) -> None:
        """``values`` [stack.numel] bf16 or fp32 @device, in place; ``workspace`` uint8 @device, [>= stack.workspace_bytes]."""

    def finish(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See the class."""
