"""Compiling templates: once per behaviour and budget, shared by all slots and units.

The partitioner decides under ``activation_memory_budget`` what the compiled forward keeps (torch.compile's min-cut with a
memory budget). Changing the global budget and compiling again would silently reuse the first graph, so each budget has a
backend of its own. The second shape of a behaviour is compiled with symbolic sizes and serves all further ones.

TRAP: all layers of one class share a code object, and dynamo goes over to eager in silence when that has been compiled
``recompile_limit`` times; what is kept would then not be what was planned. The limit is raised beyond any plan's need, and
reaching it is an error; a layer that does not compile runs eagerly, and one line says which
(tests/engine/test_compiled.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from layerferry.models.or_eager import CompiledOrEager, say_once
from layerferry.models.template import Template
from layerferry.models.token_wise import has_inner_width, run_in_chunks, token_wise_parts
from layerferry.plan import Plan

RECOMPILE_LIMIT = 512
"""Graphs of one code object: behaviours x shapes x training or evaluation x budgets, in one process."""
KEEPS_MORE = ", keeping more than planned"


def preparer(plan: Plan, hidden_size: int) -> Callable[[Template, float], None]:
    """What ``Templates`` does to a new template, whose weights are there, given its layer's activation budget, under ``plan``."""
    run = _compiler() if plan.compile else _as_it_is

    def prepare(template: Template, budget: float) -> None:
        if plan.mlp_chunk_tokens:
            chunk_parts(template, plan, hidden_size, budget)
        if plan.kept_attention:
            template.keep_attention()
        run(template, budget)

    return prepare


def _compiler() -> Callable[[Template, float], None]:
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * RECOMPILE_LIMIT)
    dynamo.fail_on_recompile_limit_hit = True

    def prepare(template: Template, budget: float) -> None:
        name = type(template.module).__name__
        template.run = CompiledOrEager(
            template.module, name, cost=KEEPS_MORE, remember=template.remember, backend=budget_backend(budget)
        )

    return prepare


def _as_it_is(template: Template, budget: float) -> None:
    return None


def chunk_parts(template: Template, plan: Plan, hidden_size: int, budget: float) -> None:
    """The token-wise parts of a layer in chunks; under the compiler only those that are wide inside, the others being fused."""
    for found in token_wise_parts(template.module, hidden_size):
        if plan.compile and not has_inner_width(found.part, hidden_size):
            continue
        name = f"{type(template.module).__name__}.{found.name}"
        if found.reason:
            say_once(f"{name} is not run in chunks of tokens: {found.reason}")
        else:
            compile_part = functools.partial(CompiledOrEager, name=name, backend=budget_backend(budget)) if plan.compile else None
            run_in_chunks(found.part, plan.mlp_chunk_tokens, compile_part)


@functools.cache
def budget_backend(budget: float) -> Callable[..., Any]:
    """Inductor under its own activation budget: one object per budget, so that graphs are shared among equals and only
    there. The backward is compiled with the forward, which can still be run eagerly instead."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        import torch._functorch.config as functorch_config
        from torch._inductor.compile_fx import compile_fx

        with functorch_config.patch(activation_memory_budget=budget, force_non_lazy_backward_lowering=True):
            return compile_fx(graph, inputs, **options)

    return backend
