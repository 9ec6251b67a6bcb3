"""An engine that only pretends, for tests of the loop: losses come from a list, and every call is recorded."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from layerferry.checkpoint.save import Saved
from layerferry.config import Config, DataConfig, ModelConfig, TrainConfig
from layerferry.data import DataSets, Report, Sampler, SampleSet
from layerferry.data.samples import Row
from layerferry.engine.engine import EvalReport, StepReport
from layerferry.plan import Plan
from layerferry.trainer.cadence import Cadence
from layerferry.trainer.checkpoints import Checkpoints
from layerferry.trainer.history import History
from layerferry.trainer.loop import Loop
from layerferry.trainer.meter import Meter
from layerferry.trainer.output import OutputFolder
from layerferry.trainer.progress import PlainLog
from layerferry.trainer.timeline import StepRecorder


@dataclass
class FakeEngine:
    """``losses[i]`` is the loss of the i-th call of ``step``; None: not finite."""

    losses: list[float | None]
    eval_loss: float = 2.0
    rows: int = 2
    num_params: int = 10
    num_trained: int = 10
    calls: list[tuple[str, Any]] = field(default_factory=list)
    saves_fail: bool = False

    @property
    def plan(self) -> Plan:
        return Plan(micro_batch_rows=self.rows)

    num_steps = 0
    has_tied_ends = False
    store = SimpleNamespace(units=())
    folder = SimpleNamespace(tensors_read=0)

    @property
    def deferred(self) -> SimpleNamespace:
        return SimpleNamespace(num_pending=0, num_done=0)

    moved_bytes = 0

    @property
    def backend(self) -> SimpleNamespace:
        return SimpleNamespace(peak_bytes=lambda: 3 * 2**30)

    def step(self, micro_batches: Any, objective: Any = None, *, lr: float) -> StepReport:
        loss = self.losses[sum(1 for name, _ in self.calls if name == "step")]
        self.calls.append(("step", lr))
        return StepReport(
            loss=float("nan") if loss is None else loss,
            grad_norm=float("inf") if loss is None else loss / 2,
            num_targets=sum(m.num_targets for m in micro_batches),
            num_tokens=sum(m.num_tokens for m in micro_batches),
            skipped=loss is None,
            seconds=0.1,
            exposed_optimizer_s=0.0,
            exposed_link_s=0.0,
        )

    def evaluate(self, micro_batches: Any, objective: Any = None) -> EvalReport:
        self.calls.append(("evaluate", sum(len(m.input_ids) for m in micro_batches)))
        targets = sum(m.num_targets for m in micro_batches)
        return EvalReport(loss=self.eval_loss, num_targets=targets)

    def settle(self) -> None:
        self.calls.append(("settle", None))

    def save_pretrained(self, folder: Path, *, tokenizer: Any = None) -> None:
        self.calls.append(("save", folder.name))
        (folder / "config.json").write_text("{}")
        if self.saves_fail:
            raise OSError(28, "No space left on device")
        (folder / "model.safetensors").write_bytes(b"weights")


@dataclass
class FakeSaver:
    """Stands for ``checkpoint.save.Saver``: a checkpoint is a folder with its small files. ``faults``: reasons by step."""

    folder: Path
    faults: dict[int, str] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    is_busy = False
    bytes_written = 0
    outcome: Saved | None = None

    def start(self, step: int, small_files: dict[str, bytes]) -> None:
        assert self.outcome is None
        self.started.append(step)
        target = self.folder / f"checkpoint-{step}"
        if step not in self.faults:
            target.mkdir()
            for name, content in small_files.items():
                (target / name).write_bytes(content)
        self.outcome = Saved(folder=target, num_bytes=10**9, seconds=1.0, held_s=0.2, fault=self.faults.get(step))

    def prove(self, step: int) -> None: ...

    def take_outcome(self, *, wait: bool) -> Saved | None:
        outcome, self.outcome = self.outcome, None
        return outcome


class FakeSchedule:
    """0.1 x the number of updates done; remembers what it observed."""

    def __init__(self) -> None:
        self.observed: list[float] = []

    def lr_at(self, step: int) -> float:
        return 0.1 * (step - 1)

    def observe(self, metric: float) -> None:
        self.observed.append(metric)

    def state_dict(self) -> dict[str, float | int]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def rows_of(lengths: list[int]) -> SampleSet:
    """One sample a length; every token is trained."""
    return SampleSet(Row(input_ids=list(range(n)), labels=list(range(n))) for n in lengths)


def make_config(folder: Path, **train: Any) -> Config:
    """A configuration that writes into ``folder``."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "disable_shuffling": True,
    }
    return Config(
        model=ModelConfig(model_name_or_path="base"), data=DataConfig(dataset=("rows",)), train=TrainConfig(**{**values, **train})
    )


def make_loop(config: Config, engine: FakeEngine, *, num_rows: int = 7, num_eval_rows: int = 0, clock: Any = None) -> Loop:
    """A loop over ``num_rows`` rows of 4 tokens at a learning rate of 0.1 x the number of updates done."""
    folder = Path(config.train.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    output = OutputFolder(folder)
    evals = {"eval": rows_of([4] * num_eval_rows)} if num_eval_rows else {}
    data = DataSets(train=rows_of([4] * num_rows), eval=evals, report=Report(), pad_id=0)
    sampler = Sampler.of(config, num_rows)
    total = sampler.total_steps(config.train.num_train_epochs, config.train.max_steps)
    cadence = Cadence.of(config.train, total, has_eval_rows=bool(evals))
    return Loop(
        config=config,
        engine=engine,  # type: ignore[arg-type]
        tokenizer=None,
        data=data,
        sampler=sampler,
        schedule=FakeSchedule(),
        cadence=cadence,
        output=output,
        history=History(config.train, cadence, output, clock=clock or time.monotonic),
        checkpoints=Checkpoints(FakeSaver(folder), {"config.json": b"{}"}),  # type: ignore[arg-type]
        reporters=[],
        progress=PlainLog(),
        recorder=StepRecorder(engine, None, 0),  # type: ignore[arg-type]
        meter=Meter(None),
        flops_per_token=lambda row_tokens: 100.0 + row_tokens,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
