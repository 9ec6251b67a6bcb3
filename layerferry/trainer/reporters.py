"""Trackers that ``report_to`` names: TensorBoard and Weights & Biases.

Both are optional packages, looked for before a model is loaded and imported when a run begins. Names of metrics are those of
Hugging Face's trainer: ``train/loss``, ``eval/loss``. They are others' code and write by themselves, by path: so a ``Minded`` one
is asked nothing while the run's folder is not where it was, and what it raises costs its entries, not the run.
Leaves out: model uploads, gradients' histograms.
Checked by ``tests/trainer/test_reporters.py``.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from layerferry.config import Config
from layerferry.errors import ConfigError
from layerferry.trainer.history import Entry
from layerferry.trainer.output import OutputFolder

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Tracker to the package that it needs."""
NO_METRIC = {"step", "epoch"}

logger = logging.getLogger("layerferry.trainer")


class Reporter(Protocol):
    """Where entries of the history are shown."""

    def report(self, entry: Entry) -> None:
        """Send one entry."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


def tracker_names(report_to: Sequence[str]) -> list[str]:
    """The trackers to use, each known and installed: found out before anything slow happens."""
    if list(report_to) == ["all"]:
        return [name for name, package in PACKAGES.items() if _is_installed(package)]
    names = [name for name in report_to if name != "none"]
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(f"report_to: {name} is not supported; use {', '.join(PACKAGES)} or none")
        if not _is_installed(PACKAGES[name]):
            raise ConfigError(f"report_to: {name} needs a package that is not installed: pip install {PACKAGES[name]}")
    return names


def open_reporters(names: Sequence[str], config: Config, output: OutputFolder) -> list[Reporter]:
    """Start the trackers of a run, which write into ``output``; ``ConfigError`` where one does not start."""
    makers: dict[str, Callable[[Config], Reporter]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    opened: list[Reporter] = []
    for name in names:
        try:
            output.files.check()
            opened.append(Minded(name, makers[name](config), output.files.check))
        except Exception as error:
            for one in opened:
                one.close()
            raise ConfigError(f"report_to: {name} does not start: {_told(error)}; report_to: none goes without") from error
    return opened


class Minded:
    """A tracker that is asked only while ``check`` passes; the first fault is told, and then it is tried again."""

    def __init__(self, name: str, tracker: Reporter, check: Callable[[], None]) -> None:
        self._name, self._tracker, self._check = name, tracker, check
        self._has_warned = False

    def report(self, entry: Entry) -> None:
        self._try(lambda: self._tracker.report(entry))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            self._check()
            call()
        except Exception as error:  # of a package that is not ours: none of it is worth a run
            if not self._has_warned:
                self._has_warned = True
                logger.error("report_to: %s does not take the entries: %s; training goes on", self._name, _told(error))


def _told(error: Exception) -> str:
    """Kind and message on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def tracker_metrics(entry: Entry) -> dict[str, float]:
    """Metric names as trackers show them."""
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": value
        for key, value in entry.items()
        if key not in NO_METRIC
    }


class TensorBoard:
    """Event files under ``logging_dir``, or under ``<output_dir>/runs``."""

    def __init__(self, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        root = Path(config.train.logging_dir or Path(config.train.output_dir) / "runs")
        self._writer: Any = SummaryWriter(log_dir=str(root / (config.train.run_name or "")))
        self._writer.add_text("config", f"```\n{asdict(config)}\n```")

    def report(self, entry: Entry) -> None:
        for name, value in tracker_metrics(entry).items():
            self._writer.add_scalar(name, value, int(entry["step"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases; project and key come from its own environment variables and login."""

    def __init__(self, config: Config) -> None:
        import wandb

        self._run: Any = wandb.init(name=config.train.run_name, dir=config.train.output_dir, config=_plain(asdict(config)))

    def report(self, entry: Entry) -> None:
        self._run.log({**tracker_metrics(entry), "train/global_step": int(entry["step"]), "train/epoch": entry["epoch"]})

    def close(self) -> None:
        self._run.finish()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
