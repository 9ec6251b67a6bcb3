"""A function compiled by torch that runs as it is where it does not compile: one line says so, and the run goes on.

What fails is known when the function is called: whoever gives a ``backend`` whose graphs have a backward must have that compiled
with the forward (``engine/compiled.py``), for behind the call there is nothing left to be run eagerly. Machines without a C
compiler, which Triton needs, are the common case. Checked by ``tests/engine/test_compiled.py``,
``tests/models/test_token_wise.py`` and ``tests/objectives``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

log = logging.getLogger(__name__)


class CompiledOrEager:
    """Calls ``function`` compiled; from its first failure to compile on, as it is. ``name`` and ``cost`` are what the line says:
    whose function it is, and what its user loses."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        cost: str = "",
        remember: Callable[[], Callable[[], None]] = lambda: _nothing,
        **options: Any,
    ) -> None:
        """``remember``: called before a call; what it gives is called where that call fails, and undoes its traces."""
        self._function, self._name, self._cost, self._remember = function, name, cost, remember
        self._run: Callable[..., Any] = torch.compile(function, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        if self._run is self._function:
            return self._function(*args, **kwargs)
        first_tensor = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        before, of_device, undo = torch.get_rng_state(), get_device_states(first_tensor), self._remember()
        try:
            return self._run(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            reason = getattr(error, "inner_exception", error)
            first = next(iter(str(reason).strip().splitlines()), "no reason given")
            line = f"{self._name} does not compile and runs eagerly{self._cost}: {type(reason).__name__}: {first}"
        say_once(line)
        self._run = self._function
        # a graph that did compile may have drawn numbers, and left its traces, before the one that did not
        undo()
        torch.set_rng_state(before)
        set_device_states(*of_device)
        return self._run(*args, **kwargs)


def _nothing() -> None:
    return None


@functools.cache
def say_once(line: str) -> None:
    """Every slot has templates of its own, which fail alike."""
    log.warning("%s", line)
