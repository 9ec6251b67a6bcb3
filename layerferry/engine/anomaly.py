"""A tape that looks at everything: the first unit whose output or gradient is not finite is named, at once.

``detect_anomaly: true`` puts it in the plain tape's place. Each look waits for the device, so a step is slower; nothing is
computed otherwise. What happens in the two ends, outside the layers, shows at their borders (the first layer's input, the
gradient that the last layer is given) or in the norms of their gradients (``check_norms``).
Checked by ``tests/engine/test_anomaly.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layerferry.engine.engine import Engine
from layerferry.engine.tape import SideGradients, Tape
from layerferry.errors import LayerFerryError
from layerferry.layout import Plane
from layerferry.models.stack import LayerCall
from layerferry.models.template import Template
from layerferry.units import Piece, Unit


class NonFinite(LayerFerryError):
    """Something is infinite or not a number; the step has updated nothing."""


class WatchfulTape(Tape):
    """A ``Tape`` that raises ``NonFinite``."""

    def forward(self, unit: Unit, micro_batch: int, template: Template, hidden: Tensor, call: LayerCall) -> Tensor:
        return _watched(super().forward, unit, micro_batch, template, hidden, call)

    def pass_on(self, unit: Unit, micro_batch: int, template: Template, hidden: Tensor, call: LayerCall) -> Tensor:
        return _watched(super().pass_on, unit, micro_batch, template, hidden, call)

    def pass_below(self, unit: Unit, micro_batch: int, template: Template, hidden: Tensor, call: LayerCall) -> Tensor:
        return _watched(super().pass_below, unit, micro_batch, template, hidden, call)

    def backward(
        self,
        unit: Unit,
        micro_batch: int,
        template: Template,
        gradients: Sequence[Tensor],
        accumulator: Plane,
        sides: SideGradients,
    ) -> Tensor | None:
        where = f"micro-batch {micro_batch}"
        _look(gradients[0], f"the gradient of the output of {unit.name} (it comes from the head)", where)
        found = super().backward(unit, micro_batch, template, gradients, accumulator, sides)
        if found is not None:
            _look(found, f"the gradient of the input of {unit.name}", where)
        return found

    def add(self, piece: Piece, micro_batch: int, gradients: Sequence[Tensor | None], accumulator: Plane) -> None:
        super().add(piece, micro_batch, gradients, accumulator)
        for entry in accumulator.layout.entries:
            if accumulator.holds(entry):
                what = f"the gradient of {piece.names[entry.name]}"
                _look(accumulator.view(entry), what, f"micro-batch {micro_batch} of {piece.name}")


def check_norms(engine: Engine, loss: float) -> None:
    """Behind a step that was not finite and in which no layer was to blame: the end whose gradient is not, or the loss."""
    for unit in (unit for unit in engine.store.units if unit.num_trained):
        norm = float(engine.drain.norms[unit.index])
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient of {unit.name} is not finite: its norm is {norm:g}")
    raise NonFinite(f"the loss is not finite ({loss:g}), or the norms' sum overflows")


def _watched(
    run: Callable[[Unit, int, Template, Tensor, LayerCall], Tensor],
    unit: Unit,
    micro_batch: int,
    template: Template,
    hidden: Tensor,
    call: LayerCall,
) -> Tensor:
    """One of a tape's forwards, its input and output looked at."""
    where = f"micro-batch {micro_batch}"
    _look(hidden, f"the input of {unit.name} (it comes from the embedding)", where)
    output = run(unit, micro_batch, template, hidden, call)
    _look(output, f"the output of {unit.name}", where)
    return output


def _look(values: Tensor, what: str, where: str) -> None:
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        count = int((~finite).sum())
        raise NonFinite(f"{what} is not finite: {count} of {values.numel()} values, {where}")
