"""Planes that are summed between two steps, to find memory that forgets.

``verify_memory: true`` wraps the optimizer: after an update the unit's planes are summed (CRC-32), and before its next update
they must sum to the same. A difference means that something has written where only the optimizer writes: bad RAM, or a fault
of ours; either way the state is no longer what was computed, and the run stops before it is saved over a good one. Gradients
are not looked at (they change by design), nor are units @device (their memory corrects itself or reports). The cost is two
passes of 1.5 GB/s a core over 12 bytes a parameter. Checked by ``tests/optim/test_verified.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from layerferry.errors import LayerFerryError
from layerferry.layout import GRAD, WEIGHT, Layout, Plane, PlaneSpec
from layerferry.optim.base import Optimizer, StagedOptimizer, StepHyper
from layerferry.optim.orthogonal import Stack

CHUNK_BYTES = 1 << 24


class VerifiedOptimizer:
    """An ``Optimizer`` around another. Remembers sums by the place of a unit's weights; one thread steps at a time."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._sums: dict[int, dict[str, list[int]]] = {}

    @property
    def state_planes(self) -> Mapping[str, PlaneSpec]:
        return self._inner.state_planes

    def bytes_per_param(self) -> float:
        return self._inner.bytes_per_param()

    def step(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See ``Optimizer.step``; raises ``LayerFerryError`` where a plane is not as the last update left it."""
        self._check(planes, layout, hyper, threads)
        self._inner.step(planes, layout, hyper, threads)
        self._remember(planes, threads)

    def _check(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        known = self._sums.pop(planes[WEIGHT].buffer.data_ptr(), None)
        if known is not None:
            with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="verify") as pool:
                self._compare(known, sums_of(planes, pool), layout, hyper.step)

    def _remember(self, planes: Mapping[str, Plane], threads: int) -> None:
        if planes[WEIGHT].buffer.device.type == "cpu":
            with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="verify") as pool:
                self._sums[planes[WEIGHT].buffer.data_ptr()] = sums_of(planes, pool)

    def _compare(self, known: dict[str, list[int]], found: dict[str, list[int]], layout: Layout, step: int) -> None:
        for kind, sums in known.items():
            for number, (before, now) in enumerate(zip(sums, found[kind], strict=True)):
                if before != now:
                    raise LayerFerryError(
                        f"verify_memory: plane {kind} of the unit with {layout.entries[0].name} changed between steps {step - 1} "
                        f"and {step}, within 16 MiB from byte {number * CHUNK_BYTES}: this machine's memory may be bad (test it "
                        "with memtest86+); the run stops, resume from the newest checkpoint on another machine"
                    )


class VerifiedStages(VerifiedOptimizer):
    """A ``StagedOptimizer`` around another: what ``prepare`` finds is compared, what ``finish`` leaves is summed."""

    def __init__(self, inner: StagedOptimizer) -> None:
        super().__init__(inner)
        self._staged = inner

    def prepare(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See ``StagedOptimizer``; raises as ``step`` does."""
        self._check(planes, layout, hyper, threads)
        self._staged.prepare(planes, layout, hyper, threads)

    def orthogonalise(self, stack: Stack, values: Tensor, workspace: Tensor) -> None:
        """See ``StagedOptimizer``."""
        self._staged.orthogonalise(stack, values, workspace)

    def finish(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See ``StagedOptimizer``."""
        self._staged.finish(planes, layout, hyper, threads)
        self._remember(planes, threads)


def verified(optimizer: Optimizer) -> Optimizer:
    """``optimizer``, watched over."""
    return VerifiedStages(optimizer) if isinstance(optimizer, StagedOptimizer) else VerifiedOptimizer(optimizer)


def sums_of(planes: Mapping[str, Plane], pool: ThreadPoolExecutor) -> dict[str, list[int]]:
    """CRC-32 of every chunk of every plane but the gradient."""
    return {kind: list(pool.map(zlib.crc32, _chunks(plane.buffer))) for kind, plane in planes.items() if kind != GRAD}


def _chunks(buffer: Tensor) -> Iterator[memoryview]:
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that an array is a buffer
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]
