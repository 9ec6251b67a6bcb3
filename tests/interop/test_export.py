"""Export of a model folder: plain transformers loads the result, and every tensor is the old one, cast."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from layerferry.config import ExportConfig, ModelConfig
from layerferry.errors import CheckpointError, ConfigError
from layerferry.interop.export import export
from tests.saved_llama import save_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_llama(tmp_path_factory.mktemp("model"), vocab_size=64)
    (path / "training_args.bin").write_bytes(b"not for others")
    return path


def run(folder: Path, target: Path, **changes: object) -> None:
    export(ExportConfig(model=ModelConfig(model_name_or_path=str(folder)), export_dir=str(target), **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("infer_dtype", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_transformers_loads_what_was_exported(folder: Path, tmp_path: Path, infer_dtype: str, dtype: torch.dtype) -> None:
    run(folder, tmp_path / "out", infer_dtype=infer_dtype)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert after.dtype == dtype
    for name, tensor in after.state_dict().items():
        assert torch.equal(tensor, before[name].to(dtype)), name
    text = "Who are you?"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text) == AutoTokenizer.from_pretrained(folder)(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert not (tmp_path / "out" / "training_args.bin").exists()


def test_quantised_weights_become_plain(tmp_path: Path) -> None:
    source = tmp_path / "fp8"
    source.mkdir()
    weight = torch.randn(4, 4).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0, 4.0], [0.5, 1.0]])
    save_file(
        {"a.weight": weight, "a.weight_scale_inv": scale, "b": torch.ones(3)}, source / "model.safetensors", {"format": "pt"}
    )
    quantised = {"model_type": "x", "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}
    (source / "config.json").write_text(json.dumps(quantised), encoding="utf-8")
    run(source, tmp_path / "out")
    expected = weight.float() * scale.repeat_interleave(2, 0).repeat_interleave(2, 1)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == {"a.weight", "b"}
    assert torch.equal(written["a.weight"], expected.to(torch.bfloat16))
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8")) == {"model_type": "x", "dtype": "bfloat16"}


def test_a_modelfile_for_ollama(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "qwen", template="qwen")
    text = (tmp_path / "qwen" / "Modelfile").read_text(encoding="utf-8")
    assert text.startswith('FROM .\n\nTEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}')
    assert '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n<|im_start|>assistant\n' in text
    assert 'PARAMETER stop "<|im_end|>"' in text
    run(folder, tmp_path / "llama2", template="llama2")
    run(folder, tmp_path / "none")
    assert not (tmp_path / "llama2" / "Modelfile").exists() and not (tmp_path / "none" / "Modelfile").exists()


def test_what_cannot_be_exported_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        run(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ConfigError, match="is the model itself"):
        run(folder, folder)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: not readable"):
        run(empty, tmp_path / "out")
    (empty / "config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable"):
        run(empty, tmp_path / "out")
    (empty / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError):
        run(empty, tmp_path / "out")
    assert not (tmp_path / "out").exists()
