"""In how many bits an optimizer keeps its state: the master weight and the moments, each chosen by itself.

    master   fp32   bf16 weight and int16 residue: the whole fp32 number         2 bytes beside the weight
             24bit  bf16 weight and int8 residue: 16 bits of mantissa            1
             bf16   the weight alone, rounded stochastically at every step       0
    moments  fp32   as torch keeps them                                          4 each
             8bit   codes and an exponent byte per block of 128 (``blocks.py``)  1.008 each

Parameters that must stay fp32 keep an fp32 weight in every format. ``FormattedOptimizer`` is the walk over a unit's spans that
all rules share: an optimizer adds the names of its moments and the numbers of its rule.
Checked by ``tests/optim/test_formats.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerferry.errors import ConfigError
from layerferry.layout import (
    BLOCK_ELEMENTS,
    CODES_PLANE,
    FP32_PLANE,
    GRAD,
    NO_PLANE,
    RESIDUE,
    RESIDUE8_PLANE,
    RESIDUE_PLANE,
    WEIGHT,
    Entry,
    Layout,
    Plane,
    PlaneSpec,
    Span,
)
from layerferry.optim.base import StepHyper
from layerferry.optim.device_kernels import device_kernels
from layerferry.optim.kernels import Kernels, Moment, Operands
from layerferry.optim.load import load_kernels
from layerferry.optim.rounding import Rounding
from layerferry.optim.rules import Rule

RESIDUES = {"fp32": RESIDUE_PLANE, "24bit": RESIDUE8_PLANE, "bf16": NO_PLANE}
MOMENTS = {"fp32": FP32_PLANE, "8bit": CODES_PLANE}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """One choice of each; the default loses nothing."""

    master: str = "fp32"
    moments: str = "fp32"

    def __post_init__(self) -> None:
        if self.master not in RESIDUES:
            raise ConfigError(f"master_weights: {self.master!r} is not one of {', '.join(RESIDUES)}")
        if self.moments not in MOMENTS:
            raise ConfigError(f"moments: {self.moments!r} is not one of {', '.join(MOMENTS)}")

    def planes(self, moments: tuple[str, ...]) -> dict[str, PlaneSpec]:
        """What an optimizer with ``moments`` asks the store for; the residue only where it is not the usual one."""
        residue = {} if self.master == "fp32" else {RESIDUE: RESIDUES[self.master]}
        return {**residue, **dict.fromkeys(moments, MOMENTS[self.moments])}


class FormattedOptimizer:
    """An ``Optimizer`` whose update is elementwise. Holds no state: all of it is in planes and ``StepHyper``."""

    moments: tuple[str, ...] = ()
    """Planes of moments, in the order in which the rule has them."""

    def __init__(self, *, weight_decay: float, state_format: StateFormat | None, seed: int, kernels: Kernels | None) -> None:
        """``kernels`` None: the native ones, or the torch reference where they cannot be built."""
        check_decay(weight_decay)
        self.weight_decay = weight_decay
        self.format = state_format or StateFormat()
        self._seed = seed
        self._host_kernels = load_kernels() if kernels is None else kernels
        self._device_kernels = device_kernels()

    def rule(self, hyper: StepHyper, *, decays: bool) -> Rule:
        """The numbers of this step for parameters with or without weight decay."""
        raise NotImplementedError

    @property
    def state_planes(self) -> Mapping[str, PlaneSpec]:
        return self.format.planes(self.moments)

    def bytes_per_param(self) -> float:
        spec = MOMENTS[self.format.moments]
        return len(self.moments) * spec.section_bytes(BLOCK_ELEMENTS, spec.dtypes[1]) / BLOCK_ELEMENTS

    def step(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See ``Optimizer.step``."""
        kernels = self._host_kernels if planes[WEIGHT].buffer.device.type == "cpu" else self._device_kernels
        rounding = Rounding.of(seed=self._seed, step=hyper.step, stream=hyper.stream)
        for span in layout.spans:
            rule = self.rule(hyper, decays=span.decays)
            kernels.update(rule, operands_of(planes, span, self.moments), rounding=rounding, threads=threads)


def operands_of(planes: Mapping[str, Plane], span: Span, moments: tuple[str, ...]) -> Operands:
    """The planes of ``span`` as a kernel takes them."""
    weight, grad = planes[WEIGHT].span(span), planes[GRAD].span(span)
    assert weight is not None and grad is not None
    found = [moment_of(planes[name], span) for name in moments]
    first, second = (*found, None, None)[:2]
    residue = planes[RESIDUE].span(span) if RESIDUE in planes else None
    return Operands(weight=weight, residue=residue, grad=grad, first=first, second=second, start=span.start)


def operands_of_parameter(planes: Mapping[str, Plane], entry: Entry, moments: tuple[str, ...]) -> Operands:
    """The same for one parameter, whatever planes of moments lie closer together than the others."""
    weight, grad = planes[WEIGHT].whole_blocks(entry), planes[GRAD].whole_blocks(entry)
    assert weight is not None and grad is not None
    found = []
    for plane in (planes[name] for name in moments):
        values = plane.whole_blocks(entry)
        assert values is not None
        found.append(Moment(values=values, exponents=plane.exponents_of(entry) if plane.spec.coded else None))
    first, second = (*found, None, None)[:2]
    residue = planes[RESIDUE].whole_blocks(entry) if RESIDUE in planes else None
    return Operands(weight=weight, residue=residue, grad=grad, first=first, second=second, start=entry.offset)


def moment_of(plane: Plane, span: Span) -> Moment:
    values = plane.span(span)
    assert values is not None
    return Moment(values=values, exponents=plane.span_exponents(span))


def check_betas(betas: tuple[float, float]) -> None:
    """``ConfigError`` where a moment would forget at once or never."""
    for key, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"{key}: {beta} is outside [0, 1)")


def check_decay(weight_decay: float) -> None:
    if not weight_decay >= 0.0:
        raise ConfigError(f"weight_decay: {weight_decay} is negative")
