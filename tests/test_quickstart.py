"""The quick start's fast parts: its rows, its configuration, and the conversion of a GGUF file against plain transformers.

The training itself is run by ``make demo``; here a tiny Llama is written as GGUF in its own layout and must come back with the
same logits, ids and special tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.data import Sampler
from layerferry.interop.llamafactory import read_config

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "recipes" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import demo  # noqa: E402
import obtain_base  # noqa: E402

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CONTROL_WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def rows(name: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads((QUICKSTART / "data" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_rows_are_ours_and_mixed() -> None:
    identity, general = rows("identity"), rows("general")
    everything = identity + general
    assert len(identity) >= 90
    assert 0.18 <= len(general) / len(everything) <= 0.25
    assert all(set(row) == {"instruction", "input", "output"} and row["instruction"] and row["output"] for row in everything)
    assert len({row["instruction"] for row in everything}) == len(everything)
    named = [row for row in identity if "Ferry" in row["output"]]
    assert len(named) >= 0.95 * len(identity)
    assert not any("Ferry" in row["output"] for row in general)


def test_the_demo_asks_what_was_not_taught() -> None:
    taught = {row["instruction"] for row in rows("identity") + rows("general")}
    assert len([question for question in demo.QUESTIONS if question not in taught]) >= 3
    assert "What is the capital of France?" not in taught


def test_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = read_config(demo.CONFIG, [])
    assert Path(config.model.model_name_or_path) == obtain_base.DEFAULT_FOLDER
    assert Path(config.train.output_dir) == demo.OUTPUT
    registry = json.loads((Path(config.data.dataset_dir) / "dataset_info.json").read_text(encoding="utf-8"))
    assert set(config.data.dataset) == set(registry)
    num_rows = len(rows("identity")) + len(rows("general"))
    steps = Sampler.of(config, num_rows).total_steps(config.train.num_train_epochs, config.train.max_steps)
    assert 24 <= steps <= 40
    assert 1e-4 <= config.optim.learning_rate <= 2e-4


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_read(recipe: Path) -> None:
    config = read_config(recipe, [])
    assert config.train.finetuning_type in ("full", "freeze") and config.data.dataset and config.train.plot_loss


def byte_words() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def pairs_from_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What a converter to GGUF does, written down row by row: row 2i of a head is its row i, row 2i + 1 its row i + half."""
    head_rows = len(weight) // num_heads
    half = head_rows // 2
    order = [head * head_rows + part * half + i for head in range(num_heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def write_gguf(path: Path, model: Any, words: list[str], merges: list[str]) -> None:
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in CONTROL_WORDS else 1 for word in words])
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kinds = {name: kind for kind, name in obtain_base.LAYER_NAMES.items()}
    for name, tensor in model.state_dict().items():
        values = tensor.float()
        if name == "lm_head.weight":
            continue
        if name.startswith("model.layers."):
            _, _, layer, kind = name.removesuffix(".weight").split(".", 3)
            if kind.endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if kind.endswith("q_proj") else config.num_key_value_heads
                values = pairs_from_halves(values, heads)
            name = f"blk.{layer}.{kinds[kind]}.weight"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_the_same_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words = [*CONTROL_WORDS, *byte_words(), "He", "ll", "Hell"]
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1234.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    source = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in source.parameters():  # values that bf16 holds; .to(bfloat16) would round rotary frequencies too
            parameter.copy_(parameter.bfloat16())
    write_gguf(tmp_path / "tiny.gguf", source, words, ["H e", "l l", "He ll"])
    obtain_base.convert(tmp_path / "tiny.gguf", tmp_path / "model")

    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    ids = torch.arange(24).reshape(2, 12) * 7 % len(words)
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, source(ids).logits)
    assert converted.generation_config.eos_token_id == 2

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 2, 0)
    text = "Hello 42 é<|im_end|>"
    found = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(found) == ["Hell", "o", "Ġ", "4", "2", "Ġ", "Ã", "©", "<|im_end|>"]
    assert tokenizer.decode(found) == text
    turns = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_whole_folder_is_not_obtained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(obtain_base, "_hub_answers", lambda: pytest.fail("asked the hub"))
    assert obtain_base.obtain(tmp_path) == tmp_path
