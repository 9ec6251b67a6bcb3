"""Muon for the matrices of the layers, AdamW for everything else: ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``.

A matrix's momentum is mixed with the clipped gradient (Nesterov), made nearly orthogonal (``orthogonal.py``) and subtracted,
times 0.2 * sqrt(its longer side): an update as large as AdamW's, so that the learning rate and weight decay are AdamW's for all
(Moonshot, arXiv 2502.16982). Embeddings, heads, norms, biases, and whatever else is no matrix of a layer are AdamW's, whose
moments are of 8 bits here: what is left to them is mostly embeddings, and with fp32 moments they would be a third of the state.

Three stages (``base.StagedOptimizer``): momentum and update, written over the gradient (a kernel's pass); the middle @device;
the descent (another pass). Both passes have every master and either momentum (``formats.py``, ``rules.py``).
Checked by ``tests/optim/test_muon.py``, ``tests/engine/test_staged.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from layerferry.config import OptimConfig
from layerferry.errors import ConfigError
from layerferry.layout import BLOCK_ELEMENTS, CODES_PLANE, GRAD, MATRICES, OTHERS, WEIGHT, Layout, Plane, PlaneSpec
from layerferry.optim.adamw import AdamW
from layerferry.optim.base import StepHyper
from layerferry.optim.device_kernels import device_kernels
from layerferry.optim.formats import MOMENTS, StateFormat, operands_of_parameter
from layerferry.optim.kernels import Kernels
from layerferry.optim.load import load_kernels
from layerferry.optim.orthogonal import Stack, orthogonalise, stacks_of
from layerferry.optim.rounding import Rounding
from layerferry.optim.rules import DescentScalars, MomentumScalars
from layerferry.optim.sgd import MOMENTUM

MATCHED_RMS = 0.2
"""Root mean square of AdamW's updates, in learning rates; an orthogonal matrix has 1 / sqrt(its longer side)."""
DEFAULT_MOMENTUM = 0.95


class Muon:
    """A ``StagedOptimizer``. Holds no state: all of it is in planes and ``StepHyper``."""

    def __init__(
        self,
        *,
        momentum: float = DEFAULT_MOMENTUM,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_format: StateFormat | None = None,
        seed: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        """``betas`` and ``eps`` are AdamW's. ``state_format``: masters of all, momentum of the matrices."""
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"optim_args: momentum={momentum} is outside [0, 1)")
        self.momentum, self.format = momentum, state_format or StateFormat()
        lean = replace(self.format, moments="8bit")
        self._others = AdamW(betas=betas, eps=eps, weight_decay=weight_decay, state_format=lean, seed=seed, kernels=kernels)
        self.weight_decay, self._seed = weight_decay, seed
        self._host_kernels = load_kernels() if kernels is None else kernels
        self._device_kernels = device_kernels()

    @classmethod
    def of(cls, config: OptimConfig, *, state_format: StateFormat | None = None, seed: int = 0) -> Muon:
        return cls(
            momentum=DEFAULT_MOMENTUM if config.momentum is None else config.momentum,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            state_format=state_format,
            seed=seed,
        )

    @property
    def state_planes(self) -> Mapping[str, PlaneSpec]:
        own = {MOMENTUM: replace(MOMENTS[self.format.moments], only=MATRICES)}
        return {**self.format.planes(()), **own, **dict.fromkeys(AdamW.moments, replace(CODES_PLANE, only=OTHERS))}

    def bytes_per_param(self) -> float:
        """Of the matrices."""
        spec = MOMENTS[self.format.moments]
        return spec.section_bytes(BLOCK_ELEMENTS, spec.dtypes[1]) / BLOCK_ELEMENTS

    def step(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See ``Optimizer.step``."""
        self.prepare(planes, layout, hyper, threads)
        dtypes = planes[GRAD].sections
        needed = max((stack.workspace_bytes(dtypes[stack.entry.dtype].dtype) for stack in stacks_of(layout)), default=0)
        workspace = torch.empty(needed, dtype=torch.uint8, device=planes[WEIGHT].buffer.device)
        for stack in stacks_of(layout):
            values = planes[GRAD].view(stack.entry).view(-1)[stack.start : stack.start + stack.numel]
            self.orthogonalise(stack, values, workspace)
        self.finish(planes, layout, hyper, threads)

    def prepare(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See ``StagedOptimizer``."""
        kernels, rounding = self._kernels(planes), self._rounding(hyper)
        one_minus = 1.0 - self.momentum
        first = MomentumScalars(grad_scale=hyper.grad_scale, momentum=self.momentum, one_minus_momentum=one_minus)
        for entry in (entry for entry in layout.entries if entry.trained):
            rule = first if entry.matrix else self._others.rule(hyper, decays=entry.decays)
            operands = operands_of_parameter(planes, entry, (MOMENTUM,) if entry.matrix else AdamW.moments)
            kernels.update(rule, operands, rounding=rounding, threads=threads)

    def orthogonalise(self, stack: Stack, values: Tensor, workspace: Tensor) -> None:
        """See ``StagedOptimizer``."""
        orthogonalise(stack, values, workspace)

    def finish(self, planes: Mapping[str, Plane], layout: Layout, hyper: StepHyper, threads: int) -> None:
        """See ``StagedOptimizer``."""
        kernels, rounding = self._kernels(planes), self._rounding(hyper)
        for entry in (entry for entry in layout.entries if entry.trained and entry.matrix):
            decay = hyper.lr * self.weight_decay if entry.decays else 0.0
            rule = DescentScalars(step_size=hyper.lr * MATCHED_RMS * math.sqrt(max(entry.shape[-2:])), decay=decay)
            kernels.update(rule, operands_of_parameter(planes, entry, ()), rounding=rounding, threads=threads)

    def _kernels(self, planes: Mapping[str, Plane]) -> Kernels:
        return self._host_kernels if planes[WEIGHT].buffer.device.type == "cpu" else self._device_kernels

    def _rounding(self, hyper: StepHyper) -> Rounding:
        return Rounding.of(seed=self._seed, step=hyper.step, stream=hyper.stream)
