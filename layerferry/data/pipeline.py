"""The whole way: a config and a tokenizer to tokenised training and evaluation sets, with a report of what was dropped.

Bad rows never end a run and never vanish: each is counted by reason, the first few are named in one warning. A set with no
row left is an error. With ``tokenized_path`` the result is kept on disk, and found there again whatever the other data keys
say. Checked by ``tests/data/test_pipeline.py``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from layerferry.config import Config
from layerferry.data import derive, kept, mix, registry, rows, templates
from layerferry.data.files import Located
from layerferry.data.jinja import JinjaEncoder
from layerferry.data.registry import Entry
from layerferry.data.rows import BadRow, Conversation
from layerferry.data.samples import Row, SampleSet
from layerferry.data.templates import Template
from layerferry.data.tokenize import Encoder, SlotEncoder, pt_rows, sft_cutoff, sft_rows
from layerferry.errors import ConfigError, DataError
from layerferry.interop.checks import check_data

logger = logging.getLogger(__name__)

NAMED_ROWS = 5
"""Dropped rows that the warning names."""

STAGES = ("pt", "sft")
Source = tuple[Entry, Located]


@dataclass
class Report:
    """What became of the rows. Written by ``build`` alone."""

    read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)
    """The first few dropped rows: origin and reason."""
    sets: dict[str, dict[str, int | float]] = field(default_factory=dict)
    """Per set: samples, tokens, trained tokens, and the lengths' least, median, mean and most."""

    @property
    def dropped(self) -> int:
        return self.reasons.total()

    def drop(self, origin: str, reason: str) -> None:
        self.reasons[reason] += 1
        if len(self.named) < NAMED_ROWS:
            self.named.append(f"{origin}: {reason}")

    def measure(self, name: str, found: SampleSet) -> None:
        lengths = found.lengths
        self.sets[name] = {
            "samples": len(found),
            "tokens": int(lengths.sum()),
            "trained_tokens": int((found.labels >= 0).sum()),
            "shortest": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "longest": int(lengths.max()),
        }

    def warning(self) -> str:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
        more = "; ..." if self.dropped > len(self.named) else ""
        return f"{self.dropped} of {self.read} rows dropped ({reasons}). First: {'; '.join(self.named)}{more}"


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """Tokenised rows: ``train`` for training, ``eval`` by name, and the id that padding gets."""

    train: SampleSet
    eval: dict[str, SampleSet]
    report: Report
    pad_id: int


def build(config: Config, tokenizer: Any) -> DataSets:
    """Read, render, tokenise. ``tokenizer`` comes from ``data.tokenizer.load``; fixing it again changes nothing."""
    check(config)
    report = Report()
    folder = None if config.data.tokenized_path is None else Path(config.data.tokenized_path)
    found = None if folder is None else kept.load(folder, isolated=config.data.neat_packing)
    if found is not None:
        logger.info("tokenised data sets are taken from %s; other data keys are not looked at", folder)
        make_encoder(config, tokenizer)  # for the tokens that the template gives its tokenizer
    else:
        found = _tokenised_sets(config, tokenizer, report)
        if folder is not None:
            kept.save(folder, found)
            logger.info("tokenised data sets are kept in %s", folder)
    for name, samples in found.items():
        report.measure(name, samples)
    train = found.pop(kept.TRAIN)
    return DataSets(train=train, eval=found, report=report, pad_id=pad_id(tokenizer))


def _tokenised_sets(config: Config, tokenizer: Any, report: Report) -> kept.Sets:
    encoder = make_encoder(config, tokenizer)
    train_sources, eval_sources = sources(config)
    found = {
        name: tokenised(name, rows_of, config, tokenizer, encoder, report)
        for name, rows_of in {kept.TRAIN: train_sources, **eval_sources}.items()
    }
    if report.dropped:
        logger.warning(report.warning())
    return found


def check(config: Config) -> None:
    """What a configuration made in Python may have wrong, and conflicts that would otherwise be silent."""
    data, stage = config.data, config.train.stage
    if stage not in STAGES:
        raise ConfigError(f"stage {stage} has no data pipeline: {', '.join(STAGES)}")
    if data.cutoff_len < 2:
        raise ConfigError(f"cutoff_len {data.cutoff_len} leaves nothing to predict: at least 2")
    if data.val_size < 0:
        raise ConfigError(f"val_size {data.val_size:g} is negative")
    check_data(config)
    if data.neat_packing and data.packing is False:
        logger.info("neat_packing implies packing: packing: false is overridden")
    if data.neat_packing and stage == "pt":
        logger.info("neat_packing: stage pt lays texts end to end, and they see each other, as in LLaMA-Factory")


def make_template(config: Config, tokenizer: Any) -> Template | None:
    """The template of the run; None for ``auto``."""
    if config.data.template == "auto":
        return None
    given = derive.derive(tokenizer) if config.data.template is None else templates.load(config.data.template)
    return templates.configured(given, config.data)


def make_encoder(config: Config, tokenizer: Any) -> Encoder:
    data = config.data
    template = make_template(config, tokenizer)
    cutoff = sft_cutoff(data)
    if template is None:
        thinking = data.enable_thinking if data.enable_thinking is False else None
        return JinjaEncoder(tokenizer, cutoff, data.default_system, thinking, data.train_on_prompt, data.mask_history)
    template.fix_tokenizer(tokenizer)
    return SlotEncoder(template, tokenizer, cutoff, data.train_on_prompt, data.mask_history)


def sources(config: Config) -> tuple[Iterable[Source], dict[str, Iterable[Source]]]:
    """Raw rows for training, and for evaluation by name (``eval``, or one per data set)."""
    data = config.data
    generator = np.random.RandomState(config.train.seed)
    train = _merged(data.dataset, config, generator)
    evals: dict[str, Iterable[Source]] = {}
    if data.eval_dataset and data.eval_on_each_dataset:
        evals = {name: _merged((name,), config, generator) for name in data.eval_dataset}
    elif data.eval_dataset:
        evals = {"eval": _merged(data.eval_dataset, config, generator)}
    elif data.val_size > 1e-6:
        everything = list(train)
        train_rows, eval_rows = mix.split(len(everything), data.val_size, config.train.seed)
        train = [everything[index] for index in train_rows]
        evals = {"eval": [everything[index] for index in eval_rows]}
    return train, evals


def _merged(names: Sequence[str], config: Config, generator: np.random.RandomState) -> Iterable[Source]:
    """The rows of several data sets in one order; lazily where no choice needs their number."""
    data = config.data
    entries = registry.resolve(tuple(names), data.dataset_dir, stage=config.train.stage)
    if data.mix_strategy == "concat" and not data.interleave_probs and all(entry.num_samples is None for entry in entries):
        return ((entry, located) for entry in entries for located in entry.rows(data.max_samples))
    tables = [_table(entry, data.max_samples, generator) for entry in entries]
    order = mix.mixed([len(table) for table in tables], data.mix_strategy, data.interleave_probs, config.train.seed)
    return [(entries[source], tables[source][row]) for source, row in order]


def _table(entry: Entry, max_samples: int | None, generator: np.random.RandomState) -> list[Located]:
    everything = list(entry.rows(max_samples if entry.num_samples is None else None))
    if not everything:
        raise DataError(f"dataset {entry.name} has no rows")
    if entry.num_samples is None:
        return everything
    return [everything[i] for i in mix.drawn(len(everything), entry.num_samples, generator)][:max_samples]


def tokenised(name: str, found: Iterable[Source], config: Config, tokenizer: Any, encoder: Encoder, report: Report) -> SampleSet:
    """One set: rows converted, encoded, stored and measured."""
    samples = SampleSet(token_rows(found, config, tokenizer, encoder, report), isolated=config.data.neat_packing)
    if not len(samples):
        raise nothing_left(name, config, report)
    return samples


def nothing_left(name: str, config: Config, report: Report) -> DataError:
    """The error about a set without rows, with the reason that most likely is it."""
    detail = f": {report.warning()}" if report.dropped else _short(config, report)
    return DataError(f"no row is left in the {name} set{detail}")


def _short(config: Config, report: Report) -> str:
    if report.read and config.train.stage == "pt":
        return f": its texts fill no block of cutoff_len {config.data.cutoff_len} tokens; lower cutoff_len or set packing: false"
    return ": its files hold no rows"


def token_rows(found: Iterable[Source], config: Config, tokenizer: Any, encoder: Encoder, report: Report) -> Iterator[Row]:
    """Rows one after another, for storing or for showing."""
    conversations = _conversations(found, config.train.stage, report)
    if config.train.stage == "pt":
        made = pt_rows(conversations, tokenizer, config.data)
    else:
        made = sft_rows(conversations, encoder, config.data, report.drop)
    return islice(made, _streamed_samples(config))


def _streamed_samples(config: Config) -> int | None:
    """``streaming`` reads no more of its sources than the steps of the run can use."""
    train = config.train
    if not config.data.streaming or train.max_steps <= 0:
        return None
    return train.max_steps * train.per_device_train_batch_size * train.gradient_accumulation_steps


def _conversations(found: Iterable[Source], stage: str, report: Report) -> Iterator[Conversation]:
    for entry, (origin, row) in found:
        report.read += 1
        try:
            yield rows.convert(row, entry, origin, stage=stage)
        except BadRow as reason:
            report.drop(origin, str(reason))


def pad_id(tokenizer: Any) -> int:
    found = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id or 0) if found is None else int(found)
