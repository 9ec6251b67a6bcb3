"""What excludes what, and what needs what, in a whole configuration: LLaMA-Factory's rules and ours.

Kept apart from the reader because a configuration made in Python deserves the same checks.
Checked by ``tests/interop/test_checks.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from layerferry.config import Config
from layerferry.errors import ConfigError

Fail = Callable[[str, str], ConfigError]
"""Key and message to the error to raise: the reader adds file and line."""

MOST_ROWS = 10_000_000
"""Of an optimizer step: no run needs more, and what is counted per micro-batch stays countable."""
_DEVICE = re.compile(r"auto|cpu|chaos|cuda(:\d+)?")


def plain_failure(key: str, message: str) -> ConfigError:
    """The error about a configuration that no file stands behind."""
    return ConfigError(f"{key}: {message}")


def check(config: Config, fail: Fail = plain_failure) -> None:
    """Raise the error of the first rule that is broken."""
    check_data(config, fail)
    _check_steps(config, fail)
    if config.train.use_llama_pro and config.train.finetuning_type != "freeze":
        raise fail("use_llama_pro", "needs finetuning_type: freeze")
    if not _DEVICE.fullmatch(config.engine.device):
        raise fail("device", f"expected auto, cuda, cuda:N, cpu or chaos, found {config.engine.device!r}")


def check_data(config: Config, fail: Fail = plain_failure) -> None:
    """The rules about data: for the reader, and for whoever builds data sets of a configuration made in Python."""
    data, train = config.data, config.train
    has_evaluation = bool(data.eval_dataset) or data.val_size > 0
    if data.eval_dataset and data.val_size > 0:
        raise fail("val_size", "excludes eval_dataset: keep one of them")
    if data.val_size > 1 and data.val_size != int(data.val_size):
        raise fail("val_size", f"expected a share below 1 or a whole number of rows, found {data.val_size}")
    if train.do_train and not data.dataset and not data.tokenized_path:
        raise fail("dataset", "missing: names from dataset_info.json, or paths to JSON, JSONL or text files")
    if train.eval_strategy != "no" and not has_evaluation and not data.tokenized_path:
        raise fail("eval_strategy", f"{train.eval_strategy} needs val_size or eval_dataset")
    if train.do_eval and not has_evaluation and not data.tokenized_path:
        raise fail("do_eval", "needs val_size or eval_dataset")
    if data.mask_history and data.train_on_prompt:
        raise fail("mask_history", "excludes train_on_prompt: keep one of them")
    if data.streaming:
        if config.train.max_steps <= 0:
            raise fail("streaming", "needs max_steps: the length of a stream is not known")
        if data.max_samples is not None:
            raise fail("max_samples", "excludes streaming: use max_steps")
        if 0 < data.val_size < 1:
            raise fail("val_size", "a share of a stream is not known: give a whole number of rows")
    if data.interleave_probs:
        if data.mix_strategy == "concat":
            raise fail("interleave_probs", "needs mix_strategy: interleave_under, interleave_over or interleave_once")
        if len(data.interleave_probs) != len(data.dataset):
            raise fail("interleave_probs", f"{len(data.interleave_probs)} probabilities for {len(data.dataset)} data sets")
        if min(data.interleave_probs) < 0 or abs(sum(data.interleave_probs) - 1) > 1e-6:
            raise fail("interleave_probs", f"expected probabilities that add up to 1, found {sum(data.interleave_probs):g}")


def _check_steps(config: Config, fail: Fail) -> None:
    train, optim = config.train, config.optim
    if train.max_steps <= 0 and train.num_train_epochs <= 0:
        raise fail("num_train_epochs", "expected more than 0, or max_steps")
    rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
    if rows > MOST_ROWS:
        key = max("gradient_accumulation_steps", "per_device_train_batch_size", key=lambda name: int(getattr(train, name)))
        raise fail(key, f"a step of {rows:,} rows; at most {MOST_ROWS:,}: lower it")
    if max(optim.adam_beta1, optim.adam_beta2) >= 1:
        raise fail("adam_beta1" if optim.adam_beta1 >= 1 else "adam_beta2", "expected less than 1")
    if optim.momentum is not None and not 0 <= optim.momentum < 1:
        raise fail("optim_args", f"expected a momentum from 0 to below 1, found {optim.momentum:g}")
    if train.fp32 and optim.master_weights in ("24bit", "bf16"):
        raise fail("master_weights", f"{optim.master_weights} contradicts fp32: fp32 weights are whole, leave the key out")
    if config.engine.update_on_arrival and optim.max_grad_norm:
        raise fail(
            "update_on_arrival",
            f"does not wait for the norm of all gradients, which max_grad_norm: {optim.max_grad_norm:g} needs: set that to 0",
        )
    if optim.adam_epsilon <= 0:
        raise fail("adam_epsilon", "expected more than 0")
    for key, strategy, steps in (
        ("logging_steps", "steps", train.logging_steps),
        ("save_steps", train.save_strategy, train.save_steps),
        ("eval_steps", train.eval_strategy, train.eval_steps),
    ):
        if strategy == "steps" and steps is not None and (steps <= 0 or (steps > 1 and steps != int(steps))):
            raise fail(key, f"expected a whole number of steps, or a share of them below 1, found {steps:g}")
