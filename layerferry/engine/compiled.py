"""Compiling templates: once per behaviour and budget, shared by all slots and units.

The partitioner decides under ``activation_memory_budget`` what the compiled forward keeps (torch.compile's min-cut with a
memory budget). Changing the global budget and compiling again would silently reuse the first graph, so each budget has a
backend of its own. A layer that does not compile runs eagerly, and one line says which.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from layerferry.models.template import Template
from layerferry.plan import Plan

log = logging.getLogger(__name__)


def preparer(plan: Plan) -> Callable[[Template], None]:
    """What ``Templates`` does to a new template under ``plan``."""
    if not plan.compile:
        return _as_it_is
    backend = budget_backend(plan.activation_budget)

    def prepare(template: Template) -> None:
        template.module.compile(backend=backend, dynamic=False)

    return prepare


def _as_it_is(template: Template) -> None:
    return None


@functools.cache
def budget_backend(budget: float) -> Callable[..., Any]:
    """Inductor under its own activation budget: one object per budget, so that graphs are shared among equals and only
    there."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        import torch._functorch.config as functorch_config
        from torch._inductor.compile_fx import compile_fx

        with functorch_config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs, **options)

    return backend
