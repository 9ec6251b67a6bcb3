"""Attention that is not computed twice: a layer that is computed again is given what its attention kernels gave the first time.

For a row of half a million tokens attention is most of the work, and what it gives (output and log-sum-exp) is as small as the
layer's input. ``AttentionOutputs`` records what the kernels below ``scaled_dot_product_attention`` return in the first forward;
in the second one the same calls, in the same order, are answered with that and nothing is computed. Both happen below autograd
(a dispatch mode, as in torch's selective checkpointing), so kernels, grouped heads, scales and dropout stay torch's, and the
backward is the kernel's own.

Only around the attention call of ``varlen.attention``, which is where transformers comes to us; a compiled layer breaks its
graph there. Left out: eager attention, and SDPA by plain matrix products, which keep no output worth the name: they are
computed again. Checked by ``tests/models/test_attention_outputs.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from layerferry.errors import PlanError

KERNELS = frozenset(
    {
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "_varlen_attn",
        "with_sinks",
    }
)
"""Operators whose results are kept, as torch calls them."""
ATTRIBUTE = "_attention_outputs"

Results = list[tuple[Any, ...]]
"""What the kernels of one layer gave, call by call: tensors and numbers."""


def refuse_kept_attention(wanted: int | None, kind: str, *, can_be_kept: bool) -> None:
    """Raise ``PlanError`` where attention is to be kept in ``wanted`` layers whose kernels we do not see."""
    if wanted and not can_be_kept:
        raise PlanError(
            f"kept_attention: {wanted}: the attention of {kind} does not come through our interface (flash_attn: auto on CUDA), "
            "so what it gives cannot be kept: set kept_attention to 0"
        )


class _Recording(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in KERNELS:
            # TRAP: autograd will hang the graph on what is returned here (tests/models/test_attention_outputs.py)
            self._results.append(_aliases(found))
        return found


class _Answering(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in KERNELS:
            return func(*args, **(kwargs or {}))
        return _aliases(self._results.pop(0))


def _aliases(found: Any) -> tuple[Any, ...]:
    several = found if isinstance(found, (tuple, list)) else (found,)
    return tuple(one.detach() if isinstance(one, Tensor) else one for one in several)


class AttentionOutputs:
    """Of one template. Off unless inside ``recording`` or ``answering``."""

    def __init__(self) -> None:
        self._mode: TorchDispatchMode | None = None
        self._results: Results | None = None

    def watch(self, layer: nn.Module) -> None:
        """The attention calls of ``layer`` come through here from now on."""
        for module in layer.modules():
            setattr(module, ATTRIBUTE, self)

    def remember(self) -> Callable[[], None]:
        """What makes the kernels' next call the one that would come now."""
        results = [] if self._results is None else self._results
        before = list(results)

        def undo() -> None:
            results[:] = before

        return undo

    @contextmanager
    def recording(self, results: Results) -> Iterator[None]:
        """Inside, what kernels give is appended to ``results``."""
        with self._under(_Recording(results), results):
            yield

    @contextmanager
    def answering(self, results: Results) -> Iterator[None]:
        """Inside, kernels give what is taken from the front of ``results``."""
        with self._under(_Answering(results), results):
            yield
        assert not results, "a second forward with fewer attention calls than the first"

    @contextmanager
    def _under(self, mode: TorchDispatchMode, results: Results) -> Iterator[None]:
        self._mode, self._results = mode, results
        try:
            yield
        finally:
            self._mode = self._results = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call(self, attention: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """``attention`` under the present mode. One with dropout is computed again, since it must draw again."""
        if self._mode is None or kwargs.get("dropout"):
            return attention(*args, **kwargs)
        with self._mode:
            return attention(*args, **kwargs)
