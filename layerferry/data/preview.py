"""What the model will see: the rows as they are trained on, for ``layerferry data``.

``samples`` gives them one by one as plain values (for ``--json``), read no further than asked; ``render`` gives text with
the trained tokens in colour, so that a wrong mask is seen before a day of training is spent on it; ``counts`` says how many rows
there are. Checked by
``tests/data/test_preview.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from layerferry.config import Config
from layerferry.data.kept import TRAIN
from layerferry.data.pipeline import Report, check, make_encoder, nothing_left, sources, token_rows
from layerferry.engine.batch import IGNORE_INDEX

logger = logging.getLogger(__name__)

TRAINED, PLAIN = "\x1b[32m", "\x1b[0m"


def samples(config: Config, tokenizer: Any, report: Report | None = None) -> Iterator[dict[str, list[int]]]:
    """Training rows in the order of the files: input_ids, labels, and position_ids where packed. ``report`` counts drops.

    Behind the last one the log says what was dropped; no row at all is an error, as it is for training.
    """
    check(config)
    found, _ = sources(config)
    kept = Report() if report is None else report
    row = None
    for row in token_rows(found, config, tokenizer, make_encoder(config, tokenizer), kept):
        sample = {"input_ids": row.input_ids, "labels": row.labels}
        yield sample if row.position_ids is None else {**sample, "position_ids": row.position_ids}
    if row is None:
        raise nothing_left(TRAIN, config, kept)
    if kept.dropped:
        logger.warning(kept.warning())


def counts(config: Config) -> str:
    """Rows in the files, for training and held out, before any is dropped or packed; reads all of them."""
    train, evals = sources(config)
    held_out = ", ".join(f"{sum(1 for _ in rows):,} {name}" for name, rows in evals.items()) or "none"
    return f"rows in the files: {sum(1 for _ in train):,} for training; held out: {held_out}"


def render(config: Config, tokenizer: Any, count: int = 3, *, colour: bool = True) -> Iterator[str]:
    """The first ``count`` rows as text: trained tokens in green, or between ⟦ and ⟧ without colour."""
    opens, closes = (TRAINED, PLAIN) if colour else ("⟦", "⟧")
    for number, sample in enumerate(islice(samples(config, tokenizer), count), 1):
        ids, labels = sample["input_ids"], sample["labels"]
        trained = sum(label != IGNORE_INDEX for label in labels)
        runs: list[str] = []
        for is_trained, run in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORE_INDEX):
            text = tokenizer.decode([token for token, _ in run])
            runs.append(f"{opens}{text}{closes}" if is_trained else text)
        yield f"row {number}: {len(ids)} tokens, {trained} trained\n{''.join(runs)}"
