"""Token-wise parts: found by proof, left whole with a reason, and in chunks the same function with the same gradients."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerferry.models.or_eager import CompiledOrEager
from layerferry.models.token_wise import has_inner_width, run_in_chunks, token_wise_parts
from tests.conformance.families import BY_TYPE, tiny_config
from tests.conformance.harness import real_model


def layer_of(model_type: str, **changes: Any) -> tuple[nn.Module, int]:
    model = real_model(tiny_config(BY_TYPE[model_type], **changes))
    from layerferry.models.stack import find_stack

    return find_stack(model, model.config)[1][0], int(model.config.get_text_config().hidden_size)


def found(layer: nn.Module, width: int) -> dict[str, str]:
    return {one.name: one.reason for one in token_wise_parts(layer, width)}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "phi3", "falcon", "gpt_neox", "olmo2"])
def test_a_familys_mlp_and_norms_are_found_and_its_attention_is_not(model_type: str) -> None:
    changes = {} if model_type != "gpt_neox" else {"hidden_dropout": 0.0}
    layer, width = layer_of(model_type, **changes)
    parts = found(layer, width)
    mlps = [name for name, child in layer.named_children() if has_inner_width(child, width) and "att" not in name]
    assert mlps and all(parts[name] == "" for name in mlps)
    assert any("norm" in name and not reason for name, reason in parts.items())
    assert not {"self_attn", "attention", "self_attention"} & parts.keys()


def test_experts_and_dropout_are_left_whole_with_the_reason() -> None:
    mixtral = found(*layer_of("mixtral"))
    assert [reason for reason in mixtral.values() if reason] == ["it has experts, whose tokens are gathered over the whole row"]
    drops = found(*layer_of("gpt2", resid_pdrop=0.5))
    assert drops["mlp"] == "a token reaches others in it, or it draws random numbers"


class Mixes(nn.Module):
    """Takes hidden states alone, and mixes tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(8, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        output = hidden @ self.weight
        if self.how == "shift":
            return output + output.roll(1, 1)
        if self.how == "length":
            return output / hidden.shape[1]
        return output.sum(-1)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("shift", "a token reaches others in it, or it draws random numbers"), ("length", "a row in pieces is not the row")],
)
def test_what_mixes_tokens_is_refused(how: str, reason: str) -> None:
    layer = nn.ModuleDict({"part": Mixes(how)})
    assert found(layer, 8) == {"part": reason}


class Shift(nn.Module):
    """An MLP behind a token shift; ``back``: tokens that it reaches back, forward if negative."""

    def __init__(self, back: int, weight: float) -> None:
        super().__init__()
        self.back, self.weight = back, nn.Parameter(torch.full((8,), weight))
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        places = torch.arange(hidden.shape[1]) - self.back
        there = ((places >= 0) & (places < hidden.shape[1])).to(hidden.dtype)[:, None]
        shifted = hidden[:, places.clamp(0, hidden.shape[1] - 1)] * there
        output: Tensor = self.down(torch.relu(self.up(hidden + self.weight * shifted)))
        return output


@pytest.mark.parametrize("weight", [0.5, 0.0], ids=["", "that begins at zero"])
@pytest.mark.parametrize("back", [1, 3, 5, 8, 29, 32, 62, -1, -8, -62])
def test_a_token_shift_is_refused_however_far_and_though_it_begins_at_zero(back: int, weight: float) -> None:
    part = Shift(back, weight)
    before = copy.deepcopy(part.state_dict())
    assert found(nn.ModuleDict({"part": part}), 8) == {"part": "a token reaches others in it, or it draws random numbers"}
    assert all(torch.equal(own, before[name]) for name, own in part.state_dict().items()), "its own weights stay"
    assert part.weight.requires_grad and isinstance(part.weight, nn.Parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_begin_at_zero_or_one_are_no_reason(dtype: torch.dtype) -> None:
    part = Shift(0, 0.0).to(dtype)
    assert found(nn.ModuleDict({"part": part, "norm": nn.LayerNorm(8, dtype=dtype)}), 8) == {"part": "", "norm": ""}


def test_what_runs_on_its_own_weights_alone_is_left_whole() -> None:
    class Proud(Shift):
        def forward(self, hidden: Tensor) -> Tensor:
            if bool(self.weight.any()):
                raise ValueError("not my weights")
            return super().forward(hidden)

    assert found(nn.ModuleDict({"part": Proud(0, 0.0)}), 8) == {"part": "it does not run with other weights (ValueError)"}


def test_what_is_no_map_of_hidden_states_is_not_spoken_of() -> None:
    assert found(nn.ModuleDict({"part": Mixes("sum"), "none": nn.ReLU(), "wide": nn.Linear(8, 9)}), 8) == {}


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_the_whole_with_its_gradients(chunk_tokens: int, dtype: torch.dtype) -> None:
    """Each number is a product over D or the inner width, or a sum over tokens, in another order: a few roundings of the dtype
    (gradients of parameters are summed in fp32 and rounded once)."""
    layer, width = layer_of("llama")
    whole = copy.deepcopy(layer.mlp).to(dtype)
    parts = copy.deepcopy(whole)
    run_in_chunks(parts, chunk_tokens, None)
    hidden = torch.randn(2, 16, width).to(dtype)
    slope = torch.randn(2, 16, width).to(dtype)
    results = []
    for part in (whole, parts):
        leaf = hidden.clone().requires_grad_(True)
        output = part(leaf)
        results.append([output, *torch.autograd.grad(output, [leaf, *part.parameters()], slope)])
    for one, other in zip(*results, strict=True):
        bound = 16 * torch.finfo(dtype).eps * one.abs().max()
        assert one.dtype == other.dtype and bool(((one - other).abs() <= bound).all())


def test_no_inner_activation_is_ever_whole() -> None:
    layer, width = layer_of("llama", intermediate_size=512)
    part = layer.mlp
    run_in_chunks(part, 8, None)
    longest: list[int] = []
    part.gate_proj.register_forward_hook(lambda module, given, output: longest.append(output.shape[1]))
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = part(torch.randn(1, 64, width, requires_grad=True))
    assert kept == [64 * width], "the input alone waits for the backward"
    output.sum().backward()
    assert max(longest) == 8 and len(longest) == 16


def test_frozen_parameters_get_no_gradient() -> None:
    layer, width = layer_of("llama")
    layer.mlp.up_proj.weight.requires_grad_(False)
    run_in_chunks(layer.mlp, 4, None)
    layer.mlp(torch.randn(1, 16, width, requires_grad=True)).sum().backward()
    assert layer.mlp.up_proj.weight.grad is None and bool(layer.mlp.down_proj.weight.grad.any())


def test_a_part_that_does_not_compile_runs_eagerly_in_both_passes() -> None:
    def broken(graph: Any, inputs: Any, **options: Any) -> Any:
        raise RuntimeError("no such instruction")

    layer, width = layer_of("llama")
    plain = copy.deepcopy(layer.mlp)
    for part, compile_part in (
        (plain, None),
        (layer.mlp, partial(CompiledOrEager, name="LlamaDecoderLayer.mlp", backend=broken)),
    ):
        run_in_chunks(part, 4, compile_part)
    hidden, results = torch.randn(1, 16, width), []
    for part in (plain, layer.mlp):
        output = part(hidden)
        results.append([output, *torch.autograd.grad(output.square().sum(), list(part.parameters()))])
    assert all(map(torch.equal, *results))
