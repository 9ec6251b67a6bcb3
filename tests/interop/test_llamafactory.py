"""LLaMA-Factory's files in: what is honoured, what is said, what is refused, and that nothing but a ConfigError comes out."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerferry.config import RESUME_NEVER, RESUME_NEWEST
from layerferry.errors import ConfigError
from layerferry.interop.keys import NESTED_SCHEMA, REFUSED, table
from layerferry.interop.llamafactory import chat_options, export_options, read_config, read_with_notices

CANONICAL = """\
### model
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json  # choices: [ds_z0_config.json, ds_z2_config.json, ds_z3_config.json]

### dataset
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/qwen3-4b/full/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""

EVALUATION = """
### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
"""

LEAST = ["model_name_or_path=m", "finetuning_type=full", "dataset=d", "bf16=true"]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read(*overrides: str) -> Any:
    return read_config(None, [*LEAST, *overrides])


def notices(*overrides: str) -> list[str]:
    return read_with_notices(None, [*LEAST, *overrides])[1]


def test_the_canonical_file_loads(tmp_path: Path) -> None:
    config, said = read_with_notices(write(tmp_path, CANONICAL + EVALUATION), ["learning_rate=1e-6"])
    assert config.model.model_name_or_path == "Qwen/Qwen3-4B-Instruct-2507" and config.model.trust_remote_code
    assert config.data.dataset == ("identity", "alpaca_en_demo") and config.data.template == "qwen3_nothink"
    assert (config.data.cutoff_len, config.data.max_samples, config.data.val_size) == (2048, 1000, 0.1)
    assert (config.optim.learning_rate, config.optim.lr_scheduler_type, config.optim.warmup_ratio) == (1e-6, "cosine", 0.1)
    assert (config.train.per_device_train_batch_size, config.train.gradient_accumulation_steps) == (1, 2)
    assert (config.train.save_steps, config.train.eval_strategy, config.train.eval_steps) == (500, "steps", 500)
    assert config.train.report_to == () and config.train.resume_from_checkpoint is None and config.train.plot_loss
    assert not config.train.fp32
    assert [line.split(":")[0] for line in said] == ["deepspeed", "bf16"]


def test_evaluation_on_a_set_of_its_own() -> None:
    config = read("eval_dataset=e", "evaluation_strategy=epoch")
    assert config.data.eval_dataset == ("e",) and config.train.eval_strategy == "epoch"


SGD = "model_name_or_path: m\nfinetuning_type: full\noptim: sgd\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_name_or_path: m\nlearning_rte: 1e-5\n", r"run.yaml:2: learning_rte: unknown key: did you mean 'learning_rate'\?"),
        ("xyzzy_plugh_frotz: 1\n", r"run.yaml:1: xyzzy_plugh_frotz: unknown key$"),
        ("seed: 1\nlearning_rate: quick\n", r"run.yaml:2: learning_rate: expected a number, found 'quick'"),
        ("bf16: 7\n", r"run.yaml:1: bf16: expected true or false, found 7"),
        ("dataset: {a: 1}\n", r"run.yaml:1: dataset: expected text"),
        ("hf_hub_token: [hf_secret]\n", r"run.yaml:1: hf_hub_token: expected text, found something else$"),
        ("model_name_or_path: m\n", r"run.yaml: finetuning_type: missing, .*set finetuning_type: full"),
        ("finetuning_type: lora\n", r"run.yaml:1: finetuning_type: 'lora' is not .*: full, freeze .*finetuning_type: full"),
        ("stage: dpo\n", r"run.yaml:1: stage: 'dpo' is not supported: pt, sft \(rm, dpo, kto and ppo are not there yet\)"),
        ("finetuning_type: full\ndataset: d\n", r"run.yaml: model_name_or_path: missing"),
        ("model_name_or_path: m\nfinetuning_type: full\n", r"run.yaml: dataset: missing"),
        ("finetuning_type: full\noutput_dir:\n", r"run.yaml:2: output_dir: empty: name the folder"),
        ("finetuning_type: full\noutput_dir: ''\n", r"run.yaml:2: output_dir: empty: name the folder"),
        ("fp16: true\n", r"run.yaml:1: fp16: True is not supported: .*bf16: true"),
        ("optim: galore_adamw\n", r"run.yaml:1: optim: 'galore_adamw' is not supported"),
        (SGD + "optim_args: nesterov=true\n", r"run.yaml:4: optim_args: expected momentum=0.9"),
        (SGD.replace("sgd", "adamw_torch") + "optim_args: momentum=0.9\n", r"run.yaml:4: optim_args: expected momentum=0.9"),
        (SGD + "optim_args: momentum=much\n", r"run.yaml:4: optim_args: expected a number"),
        (SGD + "use_muon: true\n", r"run.yaml:4: use_muon: contradicts optim: sgd"),
        ("master_weights: int8\n", r"run.yaml:1: master_weights: 'int8' is not supported: auto, fp32, 24bit, bf16"),
        ("quantization_bit: 4\n", r"run.yaml:1: quantization_bit: 4 is not supported"),
        ("save_safetensors: false\n", r"run.yaml:1: save_safetensors: False is not supported"),
        ("report_to: x", r"is not supported"),
        ("eval_strategy: steps\nevaluation_strategy: steps\n", r"run.yaml:2: eval_strategy is set twice: .* run.yaml:1"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    if text.startswith("report_to"):
        text = "model_name_or_path: m\nfinetuning_type: full\ndataset: d\n" + text
    with pytest.raises(ConfigError, match=message.replace("run.yaml", f"{tmp_path}/run.yaml")):
        read_config(write(tmp_path, text), [])


@pytest.mark.parametrize("key", sorted(NESTED_SCHEMA))
def test_the_nested_schema_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"command line: {key}: .*v1 schema"):
        read(f"{key}=x")


def test_extra_keys_are_allowed_as_in_llamafactory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_EXTRA_ARGS", "1")
    assert any("learning_rte" in line and "ignored" in line for line in notices("learning_rte=1"))


@pytest.mark.parametrize("key", [key.key for key in table().values() if key.status == REFUSED])
def test_a_refused_key_is_fine_at_its_default(key: str) -> None:
    read(f"{key}={table()[key].default}")


@pytest.mark.parametrize(
    ("overrides", "fp32"),
    [
        (["bf16=true"], False),
        (["bf16=false", "pure_bf16=true"], False),
        (["bf16=false", "device=cpu"], True),
        (["bf16=false", "use_cpu=true"], True),
        (["bf16=false"], False),
        (["bf16=null"], False),
        (["bf16=false", "fp32=true"], True),
    ],
)
def test_precision(overrides: list[str], fp32: bool) -> None:
    assert read(*overrides).train.fp32 is fp32


def test_precision_is_said() -> None:
    assert any("not set" in line for line in notices("bf16=null"))
    assert not any("not set" in line for line in notices())
    assert any(line.startswith("pure_bf16: ") for line in notices("pure_bf16=true"))
    with pytest.raises(ConfigError, match="fp32: contradicts bf16"):
        read("fp32=true")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("resume_from_checkpoint=null", None),
        ("resume_from_checkpoint=true", RESUME_NEWEST),
        ("resume_from_checkpoint=false", RESUME_NEVER),
        ("resume_from_checkpoint=out/checkpoint-3", "out/checkpoint-3"),
    ],
)
def test_resume(override: str, expected: str | None) -> None:
    assert read(override).train.resume_from_checkpoint == expected


def test_a_home_folder_is_expanded_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = read("output_dir=~/out", "logging_dir=~/logs", "disk_folder=~/disk")
    assert (config.train.output_dir, config.train.logging_dir) == ("/home/me/out", "/home/me/logs")
    assert config.engine.disk_folder == "/home/me/disk"


def test_values_in_the_ways_people_write_them() -> None:
    config = read(
        "report_to=[tensorboard,wandb]",
        "dataset=[a,b]",
        "mix_strategy=interleave_over",
        "interleave_probs='0.5,0.5'",
        'lr_scheduler_kwargs={"num_cycles": 2}',
        "warmup_steps=0.05",
        "eval_strategy=no",
        "include_num_input_tokens_seen=non_padding",
        "disable_gradient_checkpointing=true",
        "neat_packing=true",
        "packing=false",
        "host_memory=60GiB",
        "enable_thinking=null",
        "do_train=false",
        "run_name=7",
        "use_cpu=true",
    )
    assert config.train.report_to == ("tensorboard", "wandb")
    assert config.data.dataset == ("a", "b") and config.data.interleave_probs == (0.5, 0.5)
    assert config.optim.lr_scheduler_kwargs == {"num_cycles": 2} and config.optim.warmup_steps == 0.05
    assert config.train.eval_strategy == "no" and config.train.include_num_input_tokens_seen
    assert not config.train.gradient_checkpointing and not config.train.do_train and config.train.run_name == "7"
    assert config.data.packing is False and config.data.neat_packing and config.data.enable_thinking is None
    assert config.engine.host_memory == 60 * 2**30 and config.engine.device == "cpu"
    assert read("report_to=all").train.report_to == ("tensorboard", "wandb")
    assert read("use_muon=true").optim.optim == "muon" == read("use_muon=true", "optim=adamw_torch").optim.optim
    assert read("use_muon=true", "optim=muon_8bit", "optim_args=momentum=0.9").optim.momentum == 0.9
    assert read("use_muon=false").optim == read().optim and read("optim=muon").optim.momentum is None
    assert read("report_to=none").train.report_to == () == read("report_to=null").train.report_to


def test_a_device_and_use_cpu_may_not_contradict() -> None:
    with pytest.raises(ConfigError, match="use_cpu: contradicts device: cuda"):
        read("device=cuda", "use_cpu=true")


def test_chat_and_export_read_the_same_files(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model_name_or_path: m\ntemplate: qwen\ninfer_backend: huggingface\ntemperature: 0.5\nexport_dir: out\nexport_size: 2\n",
    )
    chat = chat_options(path, ["do_sample=false"])
    assert (chat.model.model_name_or_path, chat.template, chat.temperature, chat.do_sample, chat.top_p) == (
        "m",
        "qwen",
        0.5,
        False,
        0.7,
    )
    export = export_options(path, ["infer_dtype=float16"])
    assert (export.model.model_name_or_path, export.export_dir, export.export_size, export.infer_dtype) == (
        "m",
        "out",
        2,
        "float16",
    )
    folder = tmp_path / "it's ${here}, [x]"
    assert chat_options(folder, []).model.model_name_or_path == str(folder)
    with pytest.raises(ConfigError, match="export_dir: missing"):
        export_options(folder, [])
    with pytest.raises(ConfigError, match="infer_backend: 'vllm' is not supported"):
        chat_options(folder, ["infer_backend=vllm"])
    assert chat_options(path, ["rope_scaling=yarn"]).model.rope_scaling == "yarn"
    with pytest.raises(ConfigError, match="rope_scaling: an export leaves the positions of a model as they are: remove it"):
        export_options(path, ["rope_scaling=yarn"])


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.lists(st.one_of(st.integers(), st.text(max_size=5), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.dictionaries(st.sampled_from(sorted(table())), VALUES, max_size=6))
def test_any_value_of_any_key_is_a_config_or_a_config_error(tmp_path: Path, chosen: dict[str, Any]) -> None:
    import yaml

    path = tmp_path / "fuzz.yaml"
    base = {"model_name_or_path": "m", "finetuning_type": "full", "dataset": "d"}
    path.write_text(yaml.safe_dump(base | chosen), encoding="utf-8")
    for reader in (read_config, chat_options, export_options):
        try:
            reader(path, [])
        except ConfigError as error:
            assert "fuzz.yaml" in str(error)


@settings(max_examples=100, deadline=None)
@given(overrides=st.lists(st.text(max_size=20), max_size=3))
def test_any_command_line_is_a_config_or_a_config_error(overrides: list[str]) -> None:
    try:
        read_config(None, [*LEAST, *overrides])
    except ConfigError as error:
        assert str(error)
