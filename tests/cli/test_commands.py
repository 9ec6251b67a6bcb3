"""Commands with everything behind them, on a model that is a config.json and a tokenizer: plan, export, and their exit codes."""

import json
from pathlib import Path

import pytest

from layerferry import cli
from tests.saved_llama import save_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"))


def run_of(folder: Path, *more: str) -> list[str]:
    return [
        f"model_name_or_path={folder}",
        "finetuning_type=full",
        "dataset=d",
        "bf16=true",
        "device=cpu",
        "cutoff_len=64",
        *more,
    ]


def test_plan_needs_no_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert cli.main(["plan", *run_of(bare, "host_memory=8GiB")]) == 0
    assert "@host" in capsys.readouterr().out
    assert cli.main(["plan", *run_of(bare, "host_memory=8GiB"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_a_plan_that_does_not_fit_is_exit_3(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *run_of(folder, "host_memory=1MiB"), "--json"]) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out)["fits"] is False
    lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "@host" in lines[0]


def test_a_folder_without_config_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *run_of(tmp_path)]) == 2
    assert f"error: {tmp_path}: no usable config.json" in capsys.readouterr().err


def test_a_multimodal_model_is_exit_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}', encoding="utf-8")
    assert cli.main(["plan", *run_of(tmp_path)]) == 4
    assert "gemma3" in capsys.readouterr().err


def test_export_and_chat(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    assert cli.main(["export", str(folder), f"export_dir={target}", "infer_dtype=bfloat16"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and str(target) in printed.err
    assert cli.main(["chat", str(target), "--prompt", "Who are you?", "--greedy", "--system", "S", "max_new_tokens=3"]) == 0
    assert capsys.readouterr().out.endswith("\n")
