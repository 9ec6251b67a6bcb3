"""Measured facts of a machine to predicted bytes and seconds to a ``Plan``. Names are resolved on first use.

No module here bears the name of something exported: the one imported last would win.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerferry.planner.choose import choose_for as choose_for
    from layerferry.planner.flops import flops_per_token as flops_per_token
    from layerferry.planner.machine import Machine as Machine
    from layerferry.planner.machine import machine_for as machine_for
    from layerferry.planner.measure import probe as probe
    from layerferry.planner.memory import plan_specs as plan_specs
    from layerferry.planner.report import PlanReport as PlanReport
    from layerferry.planner.report import plan_for as plan_for
    from layerferry.planner.report import render as render

_HOMES = {
    "Machine": "machine",
    "PlanReport": "report",
    "choose_for": "choose",
    "flops_per_token": "flops",
    "machine_for": "machine",
    "plan_for": "report",
    "plan_specs": "memory",
    "probe": "measure",
    "render": "report",
}

__all__ = [
    "Machine",
    "PlanReport",
    "choose_for",
    "flops_per_token",
    "machine_for",
    "plan_for",
    "plan_specs",
    "probe",
    "render",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'layerferry.planner' has no attribute {name!r}")
    return getattr(import_module(f"layerferry.planner.{_HOMES[name]}"), name)
