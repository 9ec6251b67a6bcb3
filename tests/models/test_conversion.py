"""Loading and saving parameter by parameter against plain transformers: equal bits, equal names, equal files, equal logits."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from layerferry.errors import CheckpointError
from layerferry.models.parameter_source import ParameterSource
from layerferry.models.saved_checkpoint import SavedCheckpoint
from layerferry.store.dequantise import DequantisedFolder
from layerferry.store.fill import fill
from layerferry.store.safetensors_file import CheckpointFolder
from layerferry.store.safetensors_writer import write_pretrained

from .tiny_models import CONFIGS, meta_model, tiny_model

SHARD_BYTES = 20_000
State = dict[str, torch.Tensor]


def source_of(folder: Path, config: Any) -> ParameterSource:
    return ParameterSource(meta_model(config), CheckpointFolder(folder))


def load_all(source: ParameterSource) -> State:
    return {name: source.load(name) for name in source.names}


def assert_equal(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 19)[None], use_cache=False).logits


def reader(state: State) -> Callable[[str], torch.Tensor]:
    return lambda name: state[name].clone()


def edit(folder: Path, change: Callable[[State], State]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_round_trip_equals_transformers(tmp_path: Path, model_type: str, tied: bool) -> None:
    model = tiny_model(model_type, tie_word_embeddings=tied)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs, max_shard_size=SHARD_BYTES)
    reference = plain(theirs)

    source = source_of(theirs, model.config)
    state = load_all(source)
    assert_equal(state, reference.state_dict())
    assert all(value.is_contiguous() and source.num_bytes(name) == value.nbytes for name, value in state.items())

    saved = SavedCheckpoint(meta_model(model.config), source.used_transforms)
    count = sum(value.numel() for value in {id(p): p for p in reference.parameters()}.values())
    write_pretrained(ours, saved.entries(reader(state)), max_shard_bytes=SHARD_BYTES, total_parameters=count)
    their_files = {file.name for file in theirs.iterdir() if "safetensors" in file.name}
    assert {file.name for file in ours.iterdir()} == their_files and len(their_files) > 2
    for name in their_files:
        if name.endswith(".json"):
            assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
        else:
            assert_equal(load_file(ours / name), load_file(theirs / name))

    model.config.save_pretrained(ours)
    again = plain(ours)
    assert_equal(again.state_dict(), reference.state_dict())
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("model_type", CONFIGS)
def test_names_without_a_checkpoint(tmp_path: Path, model_type: str) -> None:
    """A model trained from its config alone is saved under the same names and in one file."""
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "theirs")
    saved = SavedCheckpoint(meta_model(model.config))
    written = write_pretrained(tmp_path / "ours", saved.entries(reader(model.state_dict())))
    assert written.files == ("model.safetensors",)
    assert_equal(load_file(tmp_path / "ours" / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors"))


def test_experts_are_named_one_by_one() -> None:
    saved = SavedCheckpoint(meta_model(tiny_model("qwen3_moe").config))
    names = saved.saved("model.layers.0.mlp.experts.gate_up_proj")
    assert set(names) == {f"model.layers.0.mlp.experts.{e}.{kind}_proj.weight" for e in range(12) for kind in ("gate", "up")}
    assert saved.saved("model.norm.weight") == ("model.norm.weight",)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "jamba"])
def test_old_names_per_expert_and_fused_names_load_alike(tmp_path: Path, model_type: str) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "old")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    old, fused = source_of(tmp_path / "old", model.config), source_of(tmp_path / "fused", model.config)
    name = next(name for name in old.names if name.endswith("experts.gate_up_proj"))
    assert len(old.parts(name)) == 2 * model.get_parameter(name).shape[0] and len(fused.parts(name)) == 1
    assert_equal(load_all(old), model.state_dict())
    assert_equal(load_all(fused), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_precision_of_the_checkpoint_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    """A bf16 or fp16 file gives its own bits to an fp32 model, and its fp32 tensors stay fp32."""
    model = tiny_model("deepseek_v3", dtype)
    model.model.norm.float()
    model.save_pretrained(tmp_path)
    source = source_of(tmp_path, model.config)
    assert source.dtype("model.norm.weight") == torch.float32 and source.dtype("lm_head.weight") == dtype
    assert_equal(load_all(source), model.state_dict())
    saved = SavedCheckpoint(meta_model(model.config), source.used_transforms)
    write_pretrained(tmp_path / "ours", saved.entries(source.load, source.dtype))
    assert_equal(load_file(tmp_path / "ours" / "model.safetensors"), load_file(tmp_path / "model.safetensors"))


def test_parts_of_different_precision_take_the_widest(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", torch.bfloat16)
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    edit(tmp_path, lambda state: {**state, name: state[name].float()})
    source = source_of(tmp_path, model.config)
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    assert source.dtype(fused) == source.load(fused).dtype == torch.float32
    assert torch.equal(source.load(fused), model.get_parameter(fused).float())


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom", "qwen3_moe", "falcon"])
def test_file_without_the_base_model_prefix(tmp_path: Path, model_type: str) -> None:
    model = tiny_model(model_type, tie_word_embeddings=True)
    model.base_model.save_pretrained(tmp_path)
    assert not any(name.startswith(model.base_model_prefix + ".") for name in load_file(tmp_path / "model.safetensors"))
    assert_equal(load_all(source_of(tmp_path, model.config)), model.state_dict())


def test_file_with_a_prefix_that_the_model_has_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"1 tensors have no place .* lm_head\.weight"):
        source = ParameterSource(model.base_model, CheckpointFolder(tmp_path))
    assert_equal(load_all(source), model.base_model.state_dict())


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight", "both"])
def test_tied_weights_under_either_name(tmp_path: Path, kept: str) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    value = model.lm_head.weight.detach()

    def rename(state: State) -> State:
        del state["model.embed_tokens.weight"]
        names = ("lm_head.weight", "model.embed_tokens.weight") if kept == "both" else (kept,)
        return {**state, **{name: value.clone() for name in names}}

    edit(tmp_path, rename)
    assert_equal(load_all(source_of(tmp_path, model.config)), model.state_dict())


def test_tied_config_with_two_different_tensors(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda state: {**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1})
    source = source_of(tmp_path, model.config)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        with pytest.raises(CheckpointError, match="two different tensors. Set tie_word_embeddings to false"):
            source.load(name)


def test_unexpected_tensors_in_one_warning(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    extra = {f"model.layers.0.adapter.{i}": torch.ones(1) for i in range(7)}
    silent = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    edit(tmp_path, lambda state: {**state, **silent})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source_of(tmp_path, model.config)
    edit(tmp_path, lambda state: {**state, **extra})
    with pytest.warns(UserWarning) as caught:
        source = source_of(tmp_path, model.config)
    ours = [str(warning.message) for warning in caught if "no place" in str(warning.message)]
    assert len(ours) == 1 and "7 tensors" in ours[0] and "adapter.0" in ours[0] and "and 2 more" in ours[0]
    assert_equal(load_all(source), model.state_dict())


def test_extra_layer_that_the_family_declares_is_silent(tmp_path: Path) -> None:
    """DeepSeek-V3 publishes its multi-token prediction layer as layer 61."""
    model = tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda state: {**state, "model.layers.61.eh_proj.weight": torch.ones(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source_of(tmp_path, model.config)


def test_missing_tensors(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    gone = ("model.layers.1.self_attn.q_norm.weight", "lm_head.weight")
    edit(tmp_path, lambda state: {name: value for name, value in state.items() if name not in gone})
    with pytest.raises(CheckpointError, match=r"2 of the model's \d+ tensors") as caught:
        source_of(tmp_path, model.config)
    assert all(name in str(caught.value) for name in gone)


@pytest.mark.parametrize("expert", ["0.up_proj", "11.gate_proj", "5.down_proj"])
def test_missing_expert(tmp_path: Path, expert: str) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    gone = f"model.layers.1.mlp.experts.{expert}.weight"
    edit(tmp_path, lambda state: {name: value for name, value in state.items() if name != gone})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.(gate_up|down)_proj"):
        source_of(tmp_path, model.config)


def test_wrong_shape(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda state: {**state, "model.norm.weight": torch.ones(33)})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.norm\.weight has shape \(33,\).* asks for \(32,\)"):
        source_of(tmp_path, model.config)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    """A quantised folder whose format nothing here knows would else train on its codes."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda state: state | {"model.norm.weight": state["model.norm.weight"].int()})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.norm\.weight holds torch.int32"):
        source_of(tmp_path, model.config)


def test_unknown_name(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="nothing in the checkpoint makes model.nonsense"):
        source_of(tmp_path, model.config).load("model.nonsense")


def test_fp8_blocks_dequantise_into_fused_experts(tmp_path: Path) -> None:
    """A DeepSeek-V3 file in fp8 with 16 x 16 blocks: every parameter is the product of its parts, experts in their places."""
    model = tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    expected: State = {}

    def quantise(state: State) -> State:
        made: State = {}
        for name, value in state.items():
            if value.ndim != 2 or "proj" not in name:
                made[name] = expected[name] = value
                continue
            rows, columns = (-(-size // 16) for size in value.shape)
            made[name] = (value * 500).to(torch.float8_e4m3fn)
            scale = made[name + "_scale_inv"] = torch.rand(rows, columns) / 500
            full = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: value.shape[0], : value.shape[1]]
            expected[name] = made[name].float() * full
        return made

    edit(tmp_path, quantise)
    source = ParameterSource(meta_model(model.config), DequantisedFolder(CheckpointFolder(tmp_path), block=(16, 16)))
    ours = load_all(source)
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equal(ours, plain(tmp_path).state_dict())


def test_mxfp4_equals_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = tiny_model("gpt_oss", torch.bfloat16, intermediate_size=32)
    model.save_pretrained(tmp_path)
    expected: State = {}

    def quantise(state: State) -> State:
        made = dict(state)
        for name, value in state.items():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, columns, rows = value.shape
                blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
                scales = torch.randint(115, 130, blocks.shape[:3], dtype=torch.uint8)
                made |= {name + "_blocks": blocks, name + "_scales": scales}
                del made[name]
                expected[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16)
        return made

    edit(tmp_path, quantise)
    source = ParameterSource(meta_model(model.config), DequantisedFolder(CheckpointFolder(tmp_path)))
    assert len(expected) == 4
    for name, value in {**model.state_dict(), **expected}.items():
        assert torch.equal(source.load(name), value), name


class Watched:
    """A folder that knows how many bytes of what it read are still alive."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self.live_bytes = 0
        self.most_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def read(self, name: str) -> torch.Tensor:
        value = self._folder.read(name)
        self.live_bytes += value.nbytes
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        weakref.finalize(value, self._gone, value.nbytes)
        return value

    def _gone(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


def test_fused_experts_are_read_one_matrix_at_a_time(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    watched = Watched(CheckpointFolder(tmp_path))
    source = ParameterSource(meta_model(model.config), watched)  # type: ignore[arg-type]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(source.load(name), model.get_parameter(name))
    assert watched.most_bytes == 24 * 32 * 4
    watched.most_bytes = 0
    fill(lambda name, value: None, source, source.names, read_ahead_bytes=0)
    assert watched.live_bytes == 0
    assert watched.most_bytes == 96 * 32 * 4  # the embedding, the largest tensor of the file


def test_saving_asks_for_one_parameter_at_a_time(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    living: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def read(name: str) -> torch.Tensor:
        nonlocal most
        value = model.state_dict()[name].clone()
        living.add(value)
        most = max(most, len(living))
        return value

    write_pretrained(tmp_path, SavedCheckpoint(meta_model(model.config)).entries(read), max_shard_bytes=SHARD_BYTES)
    assert most == 1
