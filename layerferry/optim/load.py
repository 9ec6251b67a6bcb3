"""Which kernels this process uses: the prebuilt library, one from the cache, one compiled now, or torch. Never a failure.

What opens is believed only after some thousands of values agree with the torch reference bit for bit. Where nothing can be built
(no compiler, a compiler that fails) training goes on in torch, and one warning says so.
Checked by ``tests/optim/test_load.py``.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from layerferry.config import cache_folder
from layerferry.layout import BLOCK_ELEMENTS
from layerferry.optim.build import NATIVE_FOLDER, BuildError, cache_key, compile_native, intact_libraries, source_key
from layerferry.optim.factored import Factored, FactoredScalars
from layerferry.optim.kernels import Kernels, Moment, Operands
from layerferry.optim.native_kernels import NativeKernels
from layerferry.optim.reference import ReferenceKernels
from layerferry.optim.rounding import Rounding
from layerferry.optim.rules import AdamWScalars, DescentScalars, LionScalars, MomentumScalars, Rule, SgdScalars

EDGE_BITS = (0x00008000, 0x3F808000, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, -0x80000000, -0x00008000)
"""Values at which a wrong split of the master shows: ties, the largest, infinity, NaN, the negative zero."""

log = logging.getLogger(__name__)


@functools.cache
def load_kernels() -> Kernels:
    """The native kernels, or the torch reference with one warning."""
    try:
        return _load_native()
    except (BuildError, OSError) as error:
        log.warning("updates run in plain torch, ten times slower than the native kernels and more: %s", error)
        return ReferenceKernels()


FOR_TWO_THREADS = 1 << 14
"""Elements from which on a second thread is given some (``kMinPerThread`` of ``native/common.h``)."""


def self_check(kernels: Kernels) -> bool:
    """Do ``kernels`` agree with the torch reference on values of every kind, two threads, bit for bit?"""
    generator = torch.Generator().manual_seed(0)
    numel = FOR_TWO_THREADS + 391
    master = torch.randn(numel, generator=generator) * torch.logspace(-30, 3, numel)
    grad = torch.randn(numel, generator=generator) * torch.logspace(-12, 6, numel)
    scalars = AdamWScalars.of(lr=1e-3, step=7, grad_scale=0.37, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    got, wanted = (
        [*_trial(each, master, grad, scalars), *_format_trial(each, master, grad, scalars), *_factored_trial(each, master, grad)]
        for each in (kernels, ReferenceKernels())
    )
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, wanted, strict=True))


def _trial(kernels: Kernels, master: torch.Tensor, grad: torch.Tensor, scalars: AdamWScalars) -> tuple[torch.Tensor, ...]:
    """Every kernel once, on moments that the one before has left."""
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    weight, residue = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    joined, plain = torch.empty_like(master), master.clone()
    edges = torch.tensor(EDGE_BITS, dtype=torch.int32).view(torch.float32)
    edge_weight, edge_residue = torch.empty_like(edges, dtype=torch.bfloat16), torch.empty_like(edges, dtype=torch.int16)
    kernels.split(edges, edge_weight, edge_residue, threads=2)
    kernels.split(master, weight, residue, threads=2)
    kernels.adamw_split(weight, residue, grad.bfloat16(), exp_avg, exp_avg_sq, scalars=scalars, threads=2)
    kernels.adamw_split(weight, residue, grad, exp_avg, exp_avg_sq, scalars=scalars, threads=2)
    kernels.adamw_fp32(plain, grad, exp_avg, exp_avg_sq, scalars=scalars, threads=2)
    kernels.join(weight, residue, joined, threads=2)
    return (edge_weight, edge_residue, weight, residue, exp_avg, exp_avg_sq, joined, plain)


def _format_trial(kernels: Kernels, master: torch.Tensor, grad: torch.Tensor, scalars: AdamWScalars) -> Iterator[torch.Tensor]:
    """Every rule on the leanest formats, 24-bit and bf16 masters with 8-bit moments; whole blocks, not from the first on."""
    numel = master.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    grad = grad[:numel].clone()
    grad[::9] = 0.0  # a moment that is zero has a code of its own
    lion = LionScalars(
        grad_scale=0.37, beta1=0.9, one_minus_beta1=0.1, beta2=0.99, one_minus_beta2=0.01, step_size=1e-3, decay=1e-4
    )
    sgd = SgdScalars(grad_scale=0.37, momentum=0.9, step_size=1e-3, decay=0.1)
    muon = (MomentumScalars(grad_scale=0.37, momentum=0.95, one_minus_momentum=0.05), DescentScalars(step_size=1e-3, decay=1e-4))
    rules: tuple[tuple[Rule, int], ...] = ((scalars, 2), (lion, 1), (sgd, 1), *((rule, 1) for rule in muon))
    for rule, num_moments in rules:
        for residue in (torch.zeros(numel, dtype=torch.int8), None):
            weight = master[:numel].to(torch.bfloat16)
            first, second = _no_moment(numel), _no_moment(numel) if num_moments == 2 else None
            operands = Operands(weight=weight, residue=residue, grad=grad, first=first, second=second, start=BLOCK_ELEMENTS)
            for step in range(3):
                kernels.update(rule, operands, rounding=Rounding.of(seed=0, step=step, stream=0), threads=2)
            planes = [weight, residue, grad.clone(), first.values, first.exponents]
            planes += [] if second is None else [second.values, second.exponents]
            yield from (plane for plane in planes if plane is not None)


def _factored_trial(kernels: Kernels, master: torch.Tensor, grad: torch.Tensor) -> Iterator[torch.Tensor]:
    """Three steps of Adafactor over two small matrices and a vector, with a master of every format; of the first, over matrices
    of several tiles, of rows, which two threads share, and of columns, where gradients of one size let every tile count."""
    wide, even = (1, 129, 130), torch.randn(grad.shape, generator=torch.Generator().manual_seed(1))
    for residue in (torch.int16, torch.int8, None):
        small, vector = (2, 13, 15), (1, 1, 2 * BLOCK_ELEMENTS - 1)
        shapes = ((1, 1117, 15), wide, vector) if residue is torch.int16 else (small, vector)
        for dtype in (torch.bfloat16, torch.float32) if residue is None else (torch.bfloat16,):
            parameters = []
            for matrices, height, width in shapes:
                numel = matrices * height * width
                gradients = even if (matrices, height, width) == wide else grad
                parameter = Factored(
                    weight=master[:numel].to(dtype, copy=True),
                    residue=None if residue is None else torch.zeros(numel, dtype=residue),
                    grad=gradients[:numel].to(dtype),
                    rows=torch.zeros(matrices, height if height > 1 else width, dtype=torch.float32),
                    columns=torch.zeros(matrices, width if height > 1 else 0, dtype=torch.float32),
                    matrices=matrices,
                    height=height,
                    width=width,
                    start=BLOCK_ELEMENTS,
                    decay=1e-4,
                )
                parameters.append(parameter)
            for step in (1, 2, 3):
                rounding = Rounding.of(seed=0, step=step, stream=0)
                scalars = {"lr": 1e-3, "beta2": 1.0 - step**-0.8, "eps": 1e-30, "clip_threshold": 1.0, "grad_scale": 0.37}
                kernels.factored.step(parameters, FactoredScalars(rounding=rounding, **scalars), threads=2)
            for parameter in parameters:
                planes = (parameter.weight, parameter.residue, parameter.rows, parameter.columns)
                yield from (plane for plane in planes if plane is not None)


def _no_moment(numel: int) -> Moment:
    values, exponents = (torch.zeros(count, dtype=torch.uint8) for count in (numel, numel // BLOCK_ELEMENTS))
    return Moment(values=values, exponents=exponents)


def _load_native() -> Kernels:
    """Prebuilt, cached, or compiled now; the last for this process alone where the cache cannot be written."""
    prebuilt = _checked(intact_libraries(NATIVE_FOLDER, source_key()))
    if prebuilt is not None:
        return prebuilt
    key = cache_key()
    with _writable_folder() as folder:
        kernels = _checked(intact_libraries(folder, key)) or _checked([compile_native(folder, key=key)])
        if kernels is None:
            raise BuildError("the compiler's work does not agree with the reference, or cannot be opened")
        return kernels


def _checked(libraries: Iterable[Path]) -> Kernels | None:
    for library in libraries:
        try:
            kernels = NativeKernels(library)
        except (OSError, AttributeError):
            continue  # another architecture, a missing OpenMP runtime
        if self_check(kernels):
            return kernels
    return None


@contextmanager
def _writable_folder() -> Iterator[Path]:
    """The user's cache folder; where that cannot be written, one that lasts until the library is open."""
    folder = cache_folder() / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if usable:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="layerferry-") as temporary:
            yield Path(temporary)
