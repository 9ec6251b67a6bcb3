"""What the first units of a model weigh, by how many they are: bytes of their planes, parameters, seconds of their updates.

Units at home are always the first ones, so the books of a search (``books.py``) read what they weigh off running sums. Checked by
``tests/planner/test_search.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from layerferry.layout import FP32_PLANE, GRAD, WEIGHT, PlaneSpec
from layerferry.planner.held import unit_bytes
from layerferry.planner.problem import Problem
from layerferry.planner.updates import orthogonal_s, update_s


class Weights:
    """Running sums over the units: entry h is what the first h units weigh."""

    def __init__(self, question: Problem, specs: Mapping[str, PlaneSpec]) -> None:
        model = question.model

        def running(*kinds: PlaneSpec) -> list[int]:
            by_unit = [unit_bytes(model, spec) for spec in kinds]
            return [0, *accumulate(sum(column) for column in zip(*by_unit, strict=True))]

        self.planes = running(*(spec for kind, spec in specs.items() if kind != GRAD or not question.on_arrival))
        self.at_home = running(*(FP32_PLANE if kind == GRAD else spec for kind, spec in specs.items()))
        self.weight, self.grad = running(specs[WEIGHT]), running(specs[GRAD])
        self.trained = [0, *accumulate(unit.num_trained for unit in model.units)]
        self.updates = [0.0, *accumulate(update_s(unit.layout, question.machine) for unit in model.units)]
        self.orthogonal_s = sum(orthogonal_s(unit.layout, question.machine) for unit in model.units)
        self.layers = [0, *accumulate(int(unit.is_layer) for unit in model.units)]
