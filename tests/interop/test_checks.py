"""Rules over a whole configuration: each broken one names its key."""

import pytest

from layerferry.errors import ConfigError
from layerferry.interop.llamafactory import read_config

LEAST = ["model_name_or_path=m", "finetuning_type=full", "bf16=true"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("dataset=d eval_dataset=e val_size=0.1", "val_size: excludes eval_dataset"),
        ("dataset=d val_size=1.5", "val_size: expected a share below 1 or a whole number"),
        ("", "dataset: missing"),
        ("dataset=d eval_strategy=steps", "eval_strategy: steps needs val_size or eval_dataset"),
        ("dataset=d do_eval=true", "do_eval: needs val_size or eval_dataset"),
        ("dataset=d mask_history=true train_on_prompt=true", "mask_history: excludes train_on_prompt"),
        ("dataset=d streaming=true", "streaming: needs max_steps"),
        ("dataset=d streaming=true max_steps=5 max_samples=3", "max_samples: excludes streaming"),
        ("dataset=d streaming=true max_steps=5 val_size=0.1", "val_size: a share of a stream"),
        ("dataset=a,b interleave_probs=[0.5,0.5]", "interleave_probs: needs mix_strategy"),
        ("dataset=a,b mix_strategy=interleave_over interleave_probs=[1.0]", "interleave_probs: 1 probabilities for 2 data sets"),
        ("dataset=a,b mix_strategy=interleave_over interleave_probs=[0.5,0.6]", "interleave_probs: expected probabilities"),
        ("dataset=d num_train_epochs=0", "num_train_epochs: expected more than 0"),
        ("dataset=d per_device_train_batch_size=1000000000000", "per_device_train_batch_size: a step of 1,000,000,000,000 rows"),
        ("dataset=d gradient_accumulation_steps=1000000000", "gradient_accumulation_steps: a step of 8,000,000,000 rows"),
        ("dataset=d adam_beta1=1", "adam_beta1: expected less than 1"),
        ("dataset=d adam_beta2=1", "adam_beta2: expected less than 1"),
        ("dataset=d adam_epsilon=0", "adam_epsilon: expected more than 0"),
        ("dataset=d optim=sgd optim_args=momentum=1", "optim_args: expected a momentum from 0 to below 1"),
        ("dataset=d bf16=false fp32=true master_weights=24bit", "master_weights: 24bit contradicts fp32"),
        ("dataset=d update_on_arrival=true", "update_on_arrival: does not wait .* max_grad_norm: 1 needs: set that to 0"),
        ("dataset=d save_steps=0", "save_steps: expected a whole number of steps"),
        ("dataset=d logging_steps=2.5", "logging_steps: expected a whole number of steps"),
        ("dataset=d device=tpu", "device: expected auto, cuda, cuda:N, cpu or chaos"),
    ],
)
def test_a_broken_rule_is_an_error(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(None, [*LEAST, *overrides.split()])


@pytest.mark.parametrize(
    "overrides",
    [
        "dataset=d val_size=0.1 eval_strategy=steps",
        "dataset=d val_size=20",
        "dataset=d eval_dataset=e eval_strategy=epoch",
        "dataset=d streaming=true max_steps=5 val_size=100",
        "dataset=a,b mix_strategy=interleave_under interleave_probs=[0.2,0.8]",
        "tokenized_path=cache",
        "dataset=d save_steps=0.1 logging_steps=1 device=cuda:1",
        "do_train=false do_eval=true eval_dataset=e",
        "dataset=d save_strategy=no save_steps=0",
        "dataset=d optim=sgd optim_args=momentum=0.9",
        "dataset=d optim=paged_adamw_8bit master_weights=bf16",
        "dataset=d update_on_arrival=true max_grad_norm=0",
    ],
)
def test_what_is_allowed_stays_allowed(overrides: str) -> None:
    read_config(None, [*LEAST, *overrides.split()])
