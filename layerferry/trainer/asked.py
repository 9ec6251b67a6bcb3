"""What a configuration asks for, as far as it can be known, and refused, without the model: data, steps, what to go on from.

Checked by ``tests/trainer/test_train.py`` and ``test_resume.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from layerferry.config import Config
from layerferry.data import DataSets, Sampler, SampleSet, build, tokenizer
from layerferry.data.batches import PAD_MULTIPLE
from layerferry.errors import ConfigError
from layerferry.models.build import read_config
from layerferry.optim.schedule import Schedule, schedule_of
from layerferry.store.scratch import check_folder as check_disk_folder
from layerferry.trainer.cadence import Cadence
from layerferry.trainer.resume import Start, find_start

MAX_STEPS = 10**9
"""More is a slip of the pen: at a step a second, thirty years."""

POSITION_TABLES = ("biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt")
"""Model types that look positions up in a table of fixed length: a longer row has no entry there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """``start``: the checkpoint that the run goes on from; None: it begins."""

    config: Config
    start: Start | None
    tokenizer: Any
    data: DataSets
    sampler: Sampler
    total_steps: int
    cadence: Cadence
    schedule: Schedule

    @classmethod
    def by(cls, config: Config) -> Asked:
        """The cheapest refusals come first."""
        if config.engine.disk_memory:
            check_disk_folder(config.disk_folder)
        start = find_start(config.train)
        loaded = tokenizer.load(config)
        data = build(config, loaded.tokenizer)
        check_rows(config, data)
        sampler = Sampler.of(config, len(data.train))
        total_steps = steps_of(config, sampler) if config.train.do_train else 0
        cadence = Cadence.of(config.train, total_steps, has_eval_rows=bool(data.eval))
        if wants_evaluation(config) and not data.eval:
            raise ConfigError("do_eval: true needs rows to evaluate on: set val_size or eval_dataset")
        return cls(
            config=config,
            start=start,
            tokenizer=loaded.tokenizer,
            data=data,
            sampler=sampler,
            total_steps=total_steps,
            cadence=cadence,
            schedule=schedule_of(config.optim, total_steps),
        )

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return max(int(samples.lengths.max()) for samples in (self.data.train, *self.data.eval.values()))


def steps_of(config: Config, sampler: Sampler) -> int:
    """The steps of the whole run; ConfigError where it has none, or more than anybody means."""
    epochs, max_steps = config.train.num_train_epochs, config.train.max_steps
    if not math.isfinite(epochs):
        raise ConfigError(f"num_train_epochs: expected a finite number, found {epochs:g}")
    steps = max_steps if max_steps > 0 else epochs * sampler.steps_per_epoch
    if steps > MAX_STEPS:
        key, value = ("max_steps", f"{max_steps}") if max_steps > 0 else ("num_train_epochs", f"{epochs:g}")
        raise ConfigError(f"{key}: {value} makes {steps:.3g} steps, at most {MAX_STEPS} are taken")
    return sampler.total_steps(epochs, max_steps)


def check_rows(config: Config, data: DataSets) -> None:
    """Raise ConfigError where the rows hold ids or positions that the model's tables do not have."""
    given = config.model
    found = read_config(
        given.model_name_or_path,
        revision=given.model_revision,
        trust_remote_code=given.trust_remote_code,
        cache_dir=given.cache_dir,
    )
    text, sets = found.get_text_config(), (data.train, *data.eval.values())
    num_positions = int(text.max_position_embeddings) if text.model_type in POSITION_TABLES else None
    longest = max(map(positions_of, sets))
    if num_positions is not None and longest > num_positions:
        raise ConfigError(
            f"cutoff_len: {config.data.cutoff_len}: the data has rows of {longest} positions (filled up to a multiple of "
            f"{PAD_MULTIPLE}), and {given.model_name_or_path} has a table of {num_positions}: "
            f"set cutoff_len: {num_positions // PAD_MULTIPLE * PAD_MULTIPLE} or less"
        )
    num_rows = int(text.vocab_size)
    largest = max(int(samples.ids.max()) for samples in sets)
    if largest >= num_rows and not given.resize_vocab:
        raise ConfigError(
            f"the data holds token {largest}, and the embedding of {given.model_name_or_path} ends at {num_rows - 1}: "
            "resize_vocab: true gives new tokens rows, or take a template whose tokens the model has"
        )


def positions_of(samples: SampleSet) -> int:
    """Positions that the widest micro-batch counts: of its padding too, unless the rows bring positions that start again."""
    if samples.positions is not None:
        return max(int(samples.positions.max()) + 1, PAD_MULTIPLE)
    return -(-int(samples.lengths.max()) // PAD_MULTIPLE) * PAD_MULTIPLE


def wants_evaluation(config: Config) -> bool:
    """Whether the run ends with an evaluation: asked for, or implied by a strategy, as Hugging Face has it."""
    return config.train.do_eval or config.train.eval_strategy != "no"
