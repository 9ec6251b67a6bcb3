"""Is the engine right for this model? A small random copy of its config, streamed through two slots, against plain autograd.

The copy has random weights and under twenty million parameters, but every behaviour of the real one (``models/shrink.py``).
It is trained for one step on the chaos backend, where copies land late and released slots hold NaN, the backward of a layer
always in another slot than its forward; loss and every gradient are compared with the whole model under plain autograd. Needs
``config.json`` and no weights. A model that the engine refuses raises ``ModelRefused``. Checked by ``tests/test_verify.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerferry.errors import LayerFerryError, ModelRefused
from layerferry.units import Unit

if TYPE_CHECKING:
    from layerferry.engine.batch import MicroBatch
    from layerferry.engine.engine import Engine

ROUNDING = 2.0**-16
"""A unit passes if no gradient is off by more than this share of its largest: 256 fp32 roundings. On most machines nothing is off
by a single bit; the faults that this command is for were all above 5e-4 (weights from the wrong slot, buffers not bound, state
shared between layers, a plane in the wrong precision)."""
MAX_PARAMS = 20_000_000
ROWS, TOKENS = 2, 24
SEED = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitResult:
    """One unit's gradients beside autograd's."""

    unit: str
    largest_difference: float
    largest_gradient: float
    equal: bool
    """To the last bit."""

    @property
    def ok(self) -> bool:
        return self.largest_difference <= ROUNDING * self.largest_gradient  # NaN is not


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What ``layerferry verify`` prints."""

    model_type: str
    num_params: int
    num_layers: int
    loss: float
    expected_loss: float
    units: tuple[UnitResult, ...]

    @property
    def ok(self) -> bool:
        return abs(self.loss - self.expected_loss) <= ROUNDING * abs(self.expected_loss) and all(unit.ok for unit in self.units)

    def render(self) -> str:
        lines = [
            f"{self.model_type}: a random copy of {self.num_params:,} parameters in {self.num_layers} layers, "
            "streamed, beside plain autograd",
            f"{'loss':<12} {self.loss:.7f} beside {self.expected_loss:.7f}",
            f"{'unit':<12} {'largest difference':>18} {'largest gradient':>18}",
        ]
        for unit in self.units:
            verdict = "equal to the last bit" if unit.equal else "rounding" if unit.ok else "WRONG"
            lines.append(f"{unit.unit:<12} {unit.largest_difference:>18.1e} {unit.largest_gradient:>18.1e}  {verdict}")
        wrong = "WRONG: do not train this model with LayerFerry, and please report it with its config.json"
        lines.append("right" if self.ok else wrong)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "parameters": self.num_params,
            "layers": self.num_layers,
            "loss": self.loss,
            "expected_loss": self.expected_loss,
            "units": [
                {
                    "unit": unit.unit,
                    "largest_difference": unit.largest_difference,
                    "largest_gradient": unit.largest_gradient,
                    "equal": unit.equal,
                    "ok": unit.ok,
                }
                for unit in self.units
            ],
            "ok": self.ok,
        }


def verify(model_dir: Path) -> VerifyReport:
    """Compare loss and gradients of the engine with plain autograd on a small copy of the model in ``model_dir``.

    Raises ``ModelRefused`` for a model that the engine does not train, ``CheckpointError`` where there is no usable config.
    """
    from layerferry.models.build import read_config, refuse_unsupported

    config = read_config(str(model_dir))
    refuse_unsupported(config)
    with torch.random.fork_rng(devices=[]):
        return _verified(config)


def _verified(config: Any) -> VerifyReport:
    from layerferry.engine.oracle import WholeRows, drawing_by_place, loss_and_gradients

    torch.manual_seed(SEED)
    model = _small_model(config)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    if num_params > MAX_PARAMS:
        raise ModelRefused(f"{config.model_type}: its small copy has {num_params:,} parameters, more than {MAX_PARAMS:,}")
    micro_batches = _micro_batches()
    engine = _engine(model)
    try:
        report = engine.step(micro_batches, WholeRows(), lr=0.0, max_grad_norm=0.0)
        engine.settle()
        with drawing_by_place(model, step=0, seed=SEED):
            expected_loss, expected = loss_and_gradients(model, micro_batches)
        return VerifyReport(
            model_type=config.model_type,
            num_params=num_params,
            num_layers=len(engine.skeleton.layer_units),
            loss=report.loss,
            expected_loss=float(expected_loss),
            units=tuple(_compared(engine, unit, expected) for unit in engine.store.units),
        )
    finally:
        engine.close()


def _small_model(config: Any) -> Any:
    """The random copy; it has run once."""
    from layerferry.models.shrink import random_model, shrunk

    try:
        model = random_model(shrunk(config))
    except LayerFerryError:
        raise
    except Exception as error:  # whatever the family's own config and model code make of small numbers
        raise ModelRefused(f"{config.model_type}: no small copy of it can be built: {_first_line(error)}") from error
    try:
        with torch.no_grad():
            model(input_ids=_micro_batches()[0].input_ids, use_cache=False)
    except Exception as error:
        reason = f"{config.model_type}: transformers does not run a small copy of it: {_first_line(error)}"
        raise ModelRefused(reason) from error
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _micro_batches() -> list[MicroBatch]:
    """Two, with ragged labels and a padded row; no id twice in one, so that look-ups are summed in one order only."""
    from layerferry.engine.batch import IGNORE_INDEX, MicroBatch
    from layerferry.models.shrink import VOCABULARY

    generator = torch.Generator().manual_seed(SEED)
    made = []
    for number in range(2):
        ids = 4 + torch.randperm(VOCABULARY - 4, generator=generator)[: ROWS * TOKENS].view(ROWS, TOKENS)
        labels, lengths = ids.clone(), torch.tensor([TOKENS, TOKENS - 5 - number])
        labels[:, : 3 + number] = IGNORE_INDEX
        labels[1, lengths[1] :] = IGNORE_INDEX
        ids[1, lengths[1] :] = 0
        made.append(MicroBatch(input_ids=ids, labels=labels, lengths=lengths))
    return made


def _engine(model: Any) -> Engine:
    from layerferry.api import load
    from layerferry.backends.chaos import ChaosBackend
    from layerferry.config import Config, ModelConfig, TrainConfig
    from layerferry.engine.oracle import OtherSlots
    from layerferry.optim.adamw import AdamW
    from layerferry.optim.reference import ReferenceKernels
    from layerferry.plan import Plan

    config = Config(model=ModelConfig(model_name_or_path=model.config.model_type), train=TrainConfig(fp32=True, seed=SEED))
    plan = Plan(fp32=True, num_slots=2, num_slabs=1)
    engine = load(model, optimizer=AdamW(kernels=ReferenceKernels()), config=config, plan=plan, backend=ChaosBackend())
    OtherSlots.take_over(engine)
    return engine


def _compared(engine: Engine, unit: Unit, expected: dict[str, Tensor]) -> UnitResult:
    from layerferry.layout import GRAD

    engine.backend.synchronize()
    plane = engine.store.plane(unit, GRAD)
    entries = [entry for entry in unit.layout.entries if plane.holds(entry)]
    pairs = [(plane.view(entry), expected[unit.names[entry.name]]) for entry in entries]
    return UnitResult(
        unit=unit.name,
        largest_difference=max((float((own - other).abs().max()) for own, other in pairs), default=0.0),
        largest_gradient=max((float(other.abs().max()) for _, other in pairs), default=0.0),
        equal=all(torch.equal(own, other) for own, other in pairs),
    )
