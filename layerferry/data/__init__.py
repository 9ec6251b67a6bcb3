"""From the data files that LLaMA-Factory's users have to token ids, labels and micro-batches.

The public entry points, for the trainer and the command line::

    tokenizer.load(config) -> Loaded(tokenizer, template, num_added)          # the tokenizer with its template's tokens fixed
    build(config, tokenizer) -> DataSets(train, eval, report, pad_id)         # sequences of Sample, and what was dropped
    Sampler.of(config, num_samples, ranks=1, rank=0)                          # steps_per_epoch, total_steps, step(cursor)
    Sampler.step(Cursor(epoch, position)) -> (sample indices of one step, the cursor after it)
    collate(samples, rows, pad_id=0) -> list[MicroBatch]                      # rows of one micro-batch, regrouped freely
    step_batches(samples, sampler, cursor, rows, pad_id) -> Iterator[StepBatch]
    Prefetch(iterator, depth=2)                                               # collates ahead; a context manager
    preview.samples(config, tokenizer), preview.render(config, tokenizer, count)

``Sample`` is (input_ids, labels, position_ids or None, sample_id, isolated), numpy int32; labels are not shifted.
``Cursor.to_json()`` is ``{"epoch": e, "position": p}`` and is all that a checkpoint has to keep.

Files: ``registry`` (dataset_info.json) -> ``files`` (rows with file and line) -> ``rows`` (conversations) -> ``mix`` (which
rows, in what order) -> ``templates`` / ``tools`` / ``jinja`` (text) -> ``tokenize`` / ``pack`` (ids and labels) ->
``batches``. Imports of transformers, datasets and pyarrow are inside the functions that need them.
"""

from __future__ import annotations

from layerferry.data.batches import Cursor, Prefetch, Sampler, StepBatch, collate, eval_batches, step_batches
from layerferry.data.pipeline import DataSets, Report, build
from layerferry.data.samples import Sample, SampleSet

__all__ = [
    "Cursor",
    "DataSets",
    "Prefetch",
    "Report",
    "Sample",
    "SampleSet",
    "Sampler",
    "StepBatch",
    "build",
    "collate",
    "eval_batches",
    "step_batches",
]
