"""Predicted seconds of one step by lane: work over measured rates, with every stated share in one table.

A lane's time is its bytes, FLOPs or parameters over the machine's rate; the step is the longest lane plus what nothing can
hide. Hidden is what runs beside compute: the uploads of every layer (twice a wave, less what slots still hold), the downloads
of its gradients, and the deferred optimizer, whose window is the forward of the next step's first wave. Not hidden: the
update and upload of the units that the next forward begins with, the download of the gradient that comes last, and the part
of the optimizer that is longer than its window.

The shares of the matmul rate by activation budget are those of DESIGN's table for a Qwen2.5-7B layer (513 to 629
model-TFLOP/s beside 715 for the matrices). Checked by ``tests/planner/test_time.py`` (upload counts against the engine's own
feed).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from layerferry.layout import GRAD, WEIGHT, PlaneSpec
from layerferry.plan import Plan, Seconds
from layerferry.planner.facts import Model
from layerferry.planner.flops import FORWARD_SHARE
from layerferry.planner.machine import Machine
from layerferry.planner.memory import Shape, plan_specs, unit_bytes

COMPILED_SHARES = ((0.0, 0.72), (0.3, 0.79), (0.5, 0.835), (0.7, 0.88), (1.0, 0.875))
"""(activation budget, share of the matmul rate that a compiled layer reaches in model FLOPs)."""
EAGER_SHARE = 0.75
EAGER_REBUILD_SHARE = 0.57
CPU_SHARE = 0.6
"""The same in plain torch on a CPU; small operations weigh more there."""


def seconds(model: Model, specs: Mapping[str, PlaneSpec], plan: Plan, shape: Shape, machine: Machine) -> Seconds:
    """One optimizer step of ``plan`` on ``machine``."""
    specs = plan_specs(specs, plan)
    flops = model.flops.per_token(shape.row_tokens) * shape.tokens_per_step
    compute = flops / (machine.matmul_flops_per_s.value * compute_share(plan, on_cpu=machine.is_cpu))
    home = frozenset(plan.on_device)
    travelling = [unit for unit in model.units if unit.index not in home]
    grad_bytes = sum(unit_bytes(model, specs[GRAD])[unit.index] for unit in travelling)
    carried = 0 if plan.resident_gradients else plan.num_waves - 1
    upload_bytes = uploaded_bytes(model, plan, specs) + carried * grad_bytes
    upload = upload_bytes / machine.upload_together_bytes_per_s.value
    download = (carried + 1) * grad_bytes / machine.download_together_bytes_per_s.value
    optimizer = sum(unit.numel for unit in travelling) * machine.optimizer_s_per_param.value
    window = compute * FORWARD_SHARE / plan.num_waves
    exposed = max(optimizer - window, 0.0)
    for unit in (model.units[0], next(unit for unit in model.units if unit.is_layer)):
        if unit.index not in home:
            exposed += unit.numel * machine.optimizer_s_per_param.value
            exposed += unit.layout.bytes(specs[WEIGHT]) / machine.upload_bytes_per_s.value
    if model.units[0].index not in home:
        exposed += model.units[0].layout.bytes(specs[GRAD]) / machine.download_bytes_per_s.value
    return Seconds(compute=compute, upload=upload, download=download, optimizer=optimizer, exposed=exposed)


def compute_share(plan: Plan, *, on_cpu: bool = False) -> float:
    """Model FLOP/s over matmul FLOP/s: recomputation and everything that is no matrix product."""
    if plan.compile:
        return _interpolate(COMPILED_SHARES, plan.activation_budget)
    whole = CPU_SHARE if on_cpu else EAGER_SHARE
    return whole if plan.activation_budget >= 1.0 else whole * EAGER_REBUILD_SHARE / EAGER_SHARE


def layer_uploads(num_layers: int, num_slots: int, num_waves: int) -> int:
    """Layer uploads of one step: slots still hold ``num_slots`` layers at each turn; every step begins with new weights."""
    missed = max(num_layers - num_slots, 0)
    return num_layers + missed + (num_waves - 1) * 2 * missed


def uploaded_bytes(model: Model, plan: Plan, specs: Mapping[str, PlaneSpec]) -> int:
    """Weight bytes that a step uploads; layers of unequal size count with their mean."""
    home = frozenset(plan.on_device)
    travelling = [
        (unit, num_bytes)
        for unit, num_bytes in zip(model.units, unit_bytes(model, specs[WEIGHT]), strict=True)
        if unit.index not in home
    ]
    layers = [num_bytes for unit, num_bytes in travelling if unit.is_layer]
    ends = [num_bytes for unit, num_bytes in travelling if not unit.is_layer]
    uploads = layer_uploads(len(layers), plan.num_slots, plan.num_waves)
    in_layers = uploads * sum(layers) // max(len(layers), 1)
    return in_layers + sum(ends) * (1 if len(ends) == 1 else plan.num_waves)


def _interpolate(table: tuple[tuple[float, float], ...], at: float) -> float:
    for (left, low), (right, high) in pairwise(table):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return table[-1][1]
