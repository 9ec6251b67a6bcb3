"""``train`` with the real engine on a tiny Llama: the losses of a plain torch loop, and the whole output folder.

The oracle trains the same model in fp32 on the same micro-batches with torch's AdamW, transformers' schedule and
``clip_grad_norm_``. Its sums are taken in another order, so losses may differ by rounding: each of a few thousand
fp32 operations on the way adds at most 6e-8 of its size, and eight updates carry it on; 1e-4 relative bounds that
with room, while an error in schedule, clipping, accumulation or decay shows at 1e-2.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.config import Config, DataConfig, EngineConfig, ModelConfig, OptimConfig, TrainConfig
from layerferry.data import Cursor, Sampler, build, step_batches, tokenizer
from layerferry.errors import CheckpointError, ConfigError, PlanError
from layerferry.models.frozen import freeze
from layerferry.trainer import train
from tests.trainer.fakes import read_lines

TOKENIZER = Path(__file__).parents[1] / "goldens" / "data" / "tokenizer"
WORDS = ("ferry", "river", "bank", "rope", "load", "north", "tide", "cold")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    for path in TOKENIZER.iterdir():
        shutil.copy(path, folder)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen texts of different lengths."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    texts = [" ".join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(3 + 2 * i)) for i in range(13)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_config(model: Path, rows: Path, output: Path, *, engine: EngineConfig | None = None, **train: Any) -> Config:
    return Config(
        model=ModelConfig(model_name_or_path=str(model)),
        data=DataConfig(
            dataset=(str(rows),), cutoff_len=48, packing=False, template="empty", val_size=train.pop("val_size", 0.0)
        ),
        optim=OptimConfig(learning_rate=3e-3, lr_scheduler_type="cosine", warmup_ratio=0.2, weight_decay=0.1, max_grad_norm=0.5),
        train=TrainConfig(
            stage="pt",
            output_dir=str(output),
            fp32=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            **{"logging_steps": 1, "num_train_epochs": 2, "save_strategy": "no", **train},
        ),
        engine=engine or EngineConfig(device="cpu"),
    )


def oracle_losses(config: Config) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, learning rate) of every step, in plain torch."""
    from transformers import AutoModelForCausalLM, get_scheduler

    loaded = tokenizer.load(config)
    data = build(config, loaded.tokenizer)
    sampler = Sampler.of(config, len(data.train))
    total = sampler.total_steps(config.train.num_train_epochs)
    model = AutoModelForCausalLM.from_pretrained(config.model.model_name_or_path, dtype=torch.float32, attn_implementation="sdpa")
    freeze(model, config.train)
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decayed, "weight_decay": config.optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.optim.learning_rate)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=-(-total // 5), num_training_steps=total)
    found = []
    batches = step_batches(data.train, sampler, Cursor(), 1, data.pad_id)
    for _ in range(total):
        micro_batches = next(batches).micro_batches
        targets = sum(m.num_targets for m in micro_batches)
        loss = torch.zeros(())
        for m in micro_batches:
            width = int(m.lengths.max())
            logits = model(m.input_ids[:, :width]).logits[:, :-1]
            loss = (
                loss
                + torch.nn.functional.cross_entropy(logits.flatten(0, 1), m.labels[:, 1:width].flatten(), reduction="sum")
                / targets
            )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        found.append((loss.item(), norm.item(), schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def test_losses_are_those_of_plain_torch(model_folder: Path, rows: Path, tmp_path: Path) -> None:
    config = make_config(model_folder, rows, tmp_path)
    expected = oracle_losses(config)
    train(config)
    logged = [e for e in json.loads((tmp_path / "trainer_state.json").read_text())["log_history"] if "loss" in e]
    assert len(logged) == len(expected) == 8
    for entry, (loss, norm, lr) in zip(logged, expected, strict=True):
        assert entry["loss"] == pytest.approx(loss, rel=1e-4)
        assert entry["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert entry["learning_rate"] == pytest.approx(lr, rel=1e-12)
    assert expected[0][2] == 0.0 and expected[-1][0] < expected[0][0] - 0.05


def test_frozen_layers_stay_and_the_rest_is_plain_torchs(
    model_folder: Path, rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's AdamW and clipping over parameters of which all but the last layer's have no gradient; the whole model is saved."""
    from transformers import AutoModelForCausalLM

    config = make_config(model_folder, rows, tmp_path, finetuning_type="freeze", freeze_trainable_layers=1)
    expected = oracle_losses(config)
    caplog.set_level("INFO")
    train(config)
    logged = [e for e in json.loads((tmp_path / "trainer_state.json").read_text())["log_history"] if "loss" in e]
    for entry, (loss, norm, _) in zip(logged, expected, strict=True):
        assert entry["loss"] == pytest.approx(loss, rel=1e-4) and entry["grad_norm"] == pytest.approx(norm, rel=1e-3)
    before, after = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (model_folder, tmp_path))
    moved = {n for n, p in after.named_parameters() if not torch.equal(p, before.get_parameter(n))}
    last = f".layers.{after.config.num_hidden_layers - 1}."
    trained = [p.numel() for n, p in after.named_parameters() if last in n]
    assert moved == {n for n, _ in after.named_parameters() if last in n}
    total = sum(p.numel() for p in after.parameters())
    assert (
        f"trainable params: {sum(trained):,} || all params: {total:,} || trainable%: {100 * sum(trained) / total:.4f}"
        in caplog.text
    )
    assert f"a fine-tune of {sum(trained):,} parameters" in (tmp_path / "README.md").read_text()


def test_the_whole_output_folder(model_folder: Path, rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "out"
    config = make_config(
        model_folder,
        rows,
        output,
        val_size=3,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        plot_loss=True,
        include_num_input_tokens_seen=True,
    )
    with caplog.at_level(logging.INFO, "layerferry"):
        train(config)
    names = {path.name for path in output.iterdir()}
    assert names >= {
        "README.md",
        "all_results.json",
        "train_results.json",
        "eval_results.json",
        "trainer_log.jsonl",
        "trainer_state.json",
        "training_loss.png",
        "training_eval_loss.png",
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "checkpoint-4",
        "checkpoint-6",
    }
    assert not [name for name in names if "partial" in name or name == "checkpoint-2"]
    results = json.loads((output / "all_results.json").read_text())
    assert set(results) >= {"epoch", "eval_loss", "eval_runtime", "perplexity", "total_flos", "train_loss", "train_runtime"}
    lines = read_lines(output / "trainer_log.jsonl")
    assert [line["current_steps"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["current_steps"] for line in lines if "eval_loss" in line] == [3, 6]
    assert lines[-1]["total_tokens"] > 0
    AutoTokenizer.from_pretrained(output)
    final = AutoModelForCausalLM.from_pretrained(output).state_dict()
    last = AutoModelForCausalLM.from_pretrained(output / "checkpoint-6").state_dict()
    before = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    assert all(torch.equal(final[name], last[name]) for name in final)
    assert all(not torch.equal(final[name], before[name]) for name in final)
    assert "step 6/6" in caplog.text
    lines = [record.getMessage() for record in caplog.records]
    [first], [second] = ([line for line in lines if line.startswith(f"step {step}/6, ")] for step in (1, 2))
    assert "ETA" not in first and "ETA" in second
    assert lines.index("loading weights ...") < next(i for i, line in enumerate(lines) if line.startswith("training: "))


def test_evaluation_alone(model_folder: Path, rows: Path, tmp_path: Path) -> None:
    train(make_config(model_folder, rows, tmp_path, val_size=3, do_train=False, do_eval=True))
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_loss"] > 0
    assert not (tmp_path / "model.safetensors").exists()


def test_evaluation_alone_adds_to_what_a_run_has_left(model_folder: Path, rows: Path, tmp_path: Path) -> None:
    train(make_config(model_folder, rows, tmp_path, val_size=3, max_steps=2, save_strategy="no"))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    train(make_config(model_folder, rows, tmp_path, val_size=3, do_train=False, do_eval=True))
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    added = {name for name in after if after[name] != before.get(name)}
    assert added == {"eval_results.json", "all_results.json", "trainer_log.jsonl"}
    assert (
        after["trainer_log.jsonl"].startswith(before["trainer_log.jsonl"]) and after["trainer_log.jsonl"].count(b"eval_loss") == 1
    )
    assert {"train_loss", "eval_loss"} <= json.loads(after["all_results.json"]).keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_train": False}, "nothing to do"),
        ({"num_train_epochs": 0}, "num_train_epochs: expected more than 0, or max_steps"),
        ({"num_train_epochs": 1e300}, r"num_train_epochs: 1e\+300 makes 4e\+300 steps, at most 1000000000"),
        ({"num_train_epochs": math.inf, "max_steps": 2}, "num_train_epochs: expected a finite number, found inf"),
        ({"max_steps": 10**9 + 1}, "max_steps: 1000000001 makes"),
        ({"do_eval": True}, "do_eval: needs val_size or eval_dataset"),
        ({"report_to": ("mlflow",)}, "mlflow is not supported"),
    ],
)
def test_refused_before_the_model_is_loaded(
    model_folder: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("layerferry.api.load", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=message):
        train(make_config(model_folder, rows, tmp_path / "out", **change))
    assert not (tmp_path / "out").exists()


def test_a_configuration_made_in_python_is_checked_as_a_file_is(model_folder: Path, rows: Path, tmp_path: Path) -> None:
    given = make_config(model_folder, rows, tmp_path / "out")
    with pytest.raises(ConfigError, match="adam_beta2: expected less than 1"):
        train(replace(given, optim=replace(given.optim, adam_beta2=1.0)))
    with pytest.raises(ConfigError, match="device: expected auto, cuda, .* found 'tpu'"):
        train(replace(given, engine=replace(given.engine, device="tpu")))
    assert not (tmp_path / "out").exists()


def test_a_token_without_a_row_is_refused(
    model_folder: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerferry.api.load", lambda *a, **k: pytest.fail("loaded"))
    config = make_config(model_folder, rows, tmp_path / "out")
    added = replace(config, model=replace(config.model, add_tokens=("ferry",)))
    with pytest.raises(ConfigError, match=r"the data holds token \d+, and the embedding"):
        train(added)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("num_positions", "fits"), [(48, True), (47, False), (32, False)])
def test_rows_beyond_the_table_of_positions_are_refused(
    model_folder: Path, rows: Path, tmp_path: Path, num_positions: int, fits: bool
) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "gpt2"
    folder.mkdir()
    for path in TOKENIZER.iterdir():
        shutil.copy(path, folder)
    size = len(AutoTokenizer.from_pretrained(folder))
    GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=num_positions)).save_pretrained(
        folder
    )
    config = make_config(folder, rows, tmp_path / "out", max_steps=4)  # all rows: the longest are cut at 48 tokens
    if fits:
        train(config)
        return
    message = rf"cutoff_len: 48: the data has rows of 48 positions .* has a table of {num_positions}: set cutoff_len: (40|32) or"
    with pytest.raises(ConfigError, match=message):
        train(config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"save_strategy": "no"}, {"save_strategy": "steps", "save_only_model": True}])
def test_a_disk_without_room_for_the_model_is_found_before_the_first_step(
    model_folder: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setattr("layerferry.trainer.run.run", lambda *a: pytest.fail("a step was taken"))
    monkeypatch.setattr("layerferry.checkpoint.files.Files.free_bytes", lambda *a: 1000)
    with pytest.raises(CheckpointError, match=r"out: (the trained model|a checkpoint) needs .* [KM]iB short. Free space"):
        train(make_config(model_folder, rows, tmp_path / "out", **change))


def test_resize_vocab_gives_new_tokens_rows(model_folder: Path, rows: Path, tmp_path: Path) -> None:
    config = make_config(model_folder, rows, tmp_path / "out", max_steps=1)
    train(replace(config, model=replace(config.model, add_tokens=("ferry",), resize_vocab=True)))
    known = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == -(-(known + 1) // 64) * 64


def test_a_plan_that_does_not_fit_leaves_nothing(model_folder: Path, rows: Path, tmp_path: Path) -> None:
    engine = EngineConfig(device="cpu", host_memory=1000)
    with pytest.raises(PlanError):
        train(make_config(model_folder, rows, tmp_path / "out", engine=engine))
    assert not (tmp_path / "out").exists()
