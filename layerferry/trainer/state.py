"""What the trainer itself must remember from one process to the next: ``run.json`` inside a checkpoint.

Everything that decides a later step or a later line of the log: the cursor, sums, schedule, history, and the facts by which a
changed data set or setting is noticed. Floats are written by ``repr``, which is exact; those that are not finite as text,
since NaN is no JSON. The engine's own state is in the planes (``layerferry/checkpoint``).
Checked by ``tests/trainer/test_state.py`` and, bit for bit, by ``tests/reliability``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from layerferry.checkpoint.files import read_small
from layerferry.config import Config
from layerferry.data import Cursor, Sampler, SampleSet
from layerferry.errors import CheckpointError
from layerferry.trainer.history import LOG_NAME, Entry

RUN_STATE = "run.json"
FORMAT = 2
MAX_STATE_BYTES = 1 << 32
"""Of a history that still makes sense."""


@dataclass(kw_only=True)
class Totals:
    """Sums over a run, and since the last log line. Written by the loop only."""

    step: int = 0
    skipped: int = 0
    loss: float = 0.0
    samples: int = 0
    window_loss: float = 0.0
    window_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The trainer's part of a checkpoint; by default that of a run which has not begun."""

    cursor: Cursor = field(default_factory=Cursor)
    totals: Totals = field(default_factory=Totals)
    tokens_seen: int = 0
    total_flops: float = 0.0
    schedule: Mapping[str, float | int] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    log_lines: list[str] = field(default_factory=list)
    """Lines of trainer_log.jsonl."""
    last_eval: tuple[int, dict[str, float]] | None = None
    eval_facts: Mapping[str, Any] = field(default_factory=dict)
    """Of the evaluation sets that ``last_eval`` has measured, or would."""
    skipped_batches: list[dict[str, Any]] = field(default_factory=list)
    """Of the newest steps, as far as they were skipped (``guards``)."""
    data: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounding: Mapping[str, Any] = field(default_factory=dict)
    """What of the plan decides the order of sums (``rounding``); empty: written before it was recorded."""

    def files(self) -> dict[str, bytes]:
        """File name to content."""
        body = {
            "format": FORMAT,
            "cursor": self.cursor.to_json(),
            "totals": asdict(self.totals),
            "tokens_seen": self.tokens_seen,
            "total_flops": self.total_flops,
            "schedule": dict(self.schedule),
            "entries": self.entries,
            "last_eval": self.last_eval,
            "eval_facts": dict(self.eval_facts),
            "skipped_batches": self.skipped_batches,
            "data": dict(self.data),
            "settings": dict(self.settings),
            "rounding": dict(self.rounding),
        }
        text = json.dumps(_packed(body), indent=1, allow_nan=False) + "\n"
        return {RUN_STATE: text.encode("utf-8"), LOG_NAME: "".join(self.log_lines).encode("utf-8")}

    def evaluation_that_holds(self, facts: Mapping[str, Any]) -> tuple[int, dict[str, float]] | None:
        """``last_eval``, unless another would be found now (None: at this step it is measured again)."""
        return self.last_eval if self.eval_facts == facts else None

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """``CheckpointError`` where the file is not what ``files`` writes."""
        path = folder / RUN_STATE
        try:
            body = json.loads(read_small(path, MAX_STATE_BYTES).decode("utf-8"))
            if body["format"] != FORMAT:
                raise CheckpointError(f"{path}: format {body['format']!r}; this version reads format {FORMAT}")
            last = body["last_eval"]
            return cls(
                cursor=Cursor.from_json(body["cursor"]),
                totals=Totals(**_metrics(body["totals"])),
                tokens_seen=int(body["tokens_seen"]),
                total_flops=float(body["total_flops"]),
                schedule=_metrics(body["schedule"]),
                entries=[_metrics(entry) for entry in body["entries"]],
                log_lines=read_small(folder / LOG_NAME, MAX_STATE_BYTES).decode("utf-8").splitlines(keepends=True),
                skipped_batches=[dict(batch) for batch in body["skipped_batches"]],
                last_eval=None if last is None else (int(last[0]), _metrics(last[1])),
                eval_facts=dict(body.get("eval_facts", {})),  # an older checkpoint has none: then it is measured again
                data=dict(body["data"]),
                settings=dict(body["settings"]),
                rounding=dict(body.get("rounding", {})),
            )
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path}: not the state of a run: {repr(error)[:200]}") from error


def data_facts(sampler: Sampler, samples: SampleSet) -> dict[str, Any]:
    """By what a changed data set, or another order of it, is noticed."""
    return {
        "rows": len(samples),
        "content": samples.fingerprint,
        "seed": sampler.seed,
        "shuffle": sampler.shuffle,
        "usable": sampler.usable,
    }


def eval_facts(config: Config, sets: Mapping[str, SampleSet]) -> dict[str, Any]:
    """By what it is noticed that an evaluation would no longer give the number it gave, though the weights are the same."""
    return {
        "sets": {name: samples.fingerprint for name, samples in sets.items()},
        "fp32": config.train.fp32,
        "flash_attn": config.model.flash_attn,
    }


def check_data(folder: Path, saved: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """The cursor means nothing in another order of rows."""
    names = {
        "rows": "number of training rows",
        "content": "row somewhere (ids, labels or order: other files, tokenizer, template or cutoff_len)",
        "seed": "seed of the order (data_seed, seed)",
        "shuffle": "shuffling (disable_shuffling)",
        "usable": "number of rows an epoch uses",
    }
    for key, name in names.items():
        if saved.get(key) != found[key]:
            change = "" if key == "content" else f": {saved.get(key)} then, {found[key]} now"
            raise CheckpointError(
                f"{folder}: the data is not that of the checkpoint: another {name}{change}. Restore it to resume exactly; to "
                "train on other data, start anew with model_name_or_path set to the checkpoint and another output_dir"
            )


def settings_of(config: Config, total_steps: int) -> dict[str, Any]:
    """Settings that decide numbers: a run may change them when it resumes, but not in silence."""
    train = config.train
    return {
        **{key: value for key, value in asdict(config.optim).items() if key != "lr_scheduler_kwargs"},
        "lr_scheduler_kwargs": dict(config.optim.lr_scheduler_kwargs),
        "total_steps": total_steps,
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "seed": train.seed,
        "fp32": train.fp32,
        "finetuning_type": train.finetuning_type,
        "flash_attn": config.model.flash_attn,
    }


def changes(saved: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """``key: before -> now`` for every setting that differs."""
    return [f"{key}: {saved[key]} -> {found[key]}" for key in found if key in saved and saved[key] != found[key]]


def _metrics(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _unpacked(item) for key, item in value.items()}


def _packed(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {key: _packed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_packed(item) for item in value]
    return value


def _unpacked(value: Any) -> float | int:
    """A number; text stands for one that is not finite."""
    if type(value) is int:
        return value
    return float(value)
