"""Prologue, layers, epilogue: what belongs to which, and that around the layers the model computes as it always did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from layerferry.errors import ModelRefused
from layerferry.layout import WEIGHT, WEIGHT_PLANE, Plane
from layerferry.models.build import build_on_meta
from layerferry.models.embedding import EmbeddingTap
from layerferry.models.skeleton import Inputs, Skeleton, graph_leaves
from layerferry.models.stack import Extra, StubScript, find_stack, hidden_of
from tests.conformance.families import BY_TYPE, FAMILIES, Family, tiny_config
from tests.conformance.harness import make_engine, micro_batches, real_model

CPU = torch.device("cpu")


def skeleton_of(model_type: str, *, fp32: bool = True, **changes: Any) -> Skeleton:
    dtype = torch.float32 if fp32 else torch.bfloat16
    model = build_on_meta(tiny_config(BY_TYPE[model_type], **changes), dtype=dtype, attention="eager")
    return Skeleton(model, decays=lambda *_: True, device=CPU, fp32=fp32)


# -------------------------------------------------------------------- units


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_parameter_is_in_exactly_one_unit(family: Family) -> None:
    names = [name for name, _ in build_on_meta(tiny_config(family), dtype=torch.float32).named_parameters()]
    skeleton = skeleton_of(family.model_type)
    assert sorted(names) == sorted(name for unit in skeleton.units for name in unit.names.values())
    assert [unit.index for unit in skeleton.units] == list(range(len(skeleton.units)))


def test_untied_ends_are_two_units_and_tied_ones_are_one() -> None:
    untied, tied = skeleton_of("llama"), skeleton_of("llama", tie_word_embeddings=True)
    assert [unit.name for unit in untied.units] == ["prologue", "layer.0", "layer.1", "layer.2", "layer.3", "epilogue"]
    assert list(untied.prologue_unit.names.values()) == ["model.embed_tokens.weight"]
    assert sorted(untied.epilogue_unit.names.values()) == ["lm_head.weight", "model.norm.weight"]
    assert [unit.name for unit in tied.units] == ["ends", "layer.0", "layer.1", "layer.2", "layer.3"]
    assert tied.prologue_unit is tied.epilogue_unit
    assert sorted(tied.prologue_unit.names.values()) == ["model.embed_tokens.weight", "model.norm.weight"]


def test_no_weight_is_ever_allocated() -> None:
    skeleton = skeleton_of("mixtral")
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    assert all(parameter.is_meta for layer in skeleton.layers for parameter in layer.parameters())


def test_fp32_parameters_come_from_the_familys_list_and_from_how_it_makes_them() -> None:
    def wide(model_type: str) -> set[str]:
        units = skeleton_of(model_type, fp32=False).units
        return {u.names[e.name] for u in units for e in u.layout.entries if e.dtype == torch.float32}

    assert not wide("llama")
    assert wide("deepseek_v3") == {f"model.layers.{index}.mlp.gate.weight" for index in (1, 2, 3)}
    assert wide("olmo_hybrid") == {f"model.layers.{index}.linear_attn.A_log" for index in (0, 2)}
    assert wide("hunyuan_v1_moe") == {f"model.layers.{index}.mlp.gate.wg.weight" for index in range(4)}


def test_frozen_parameters_do_not_decay() -> None:
    skeleton = skeleton_of("ernie4_5_moe")
    for unit in skeleton.layer_units[1:]:
        decaying = {entry.name: entry.decays for entry in unit.layout.entries}
        assert not decaying["mlp.gate.moe_statics.e_score_correction_bias"] and decaying["mlp.gate.weight"]


def test_persistent_buffers_are_known_by_their_model_name() -> None:
    skeleton = skeleton_of("deepseek_v3")
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert name in skeleton.buffer_names and not any("inv_freq" in known for known in skeleton.buffer_names)
    value = torch.arange(4.0)
    skeleton.set_buffer(name, value)
    assert torch.equal(skeleton.get_buffer(name), value)
    assert not torch.equal(skeleton.get_buffer(name.replace(".2.", ".1.")), value)


# -------------------------------------------------------------------- running


def bound(skeleton: Skeleton, engine: Any) -> None:
    for unit in {
        skeleton.prologue_unit.index: skeleton.prologue_unit,
        skeleton.epilogue_unit.index: skeleton.epilogue_unit,
    }.values():
        skeleton.bind(unit, Plane(unit.layout, WEIGHT_PLANE, engine.store.plane(unit, WEIGHT).buffer))


@pytest.mark.parametrize("chunk", [1, 7, 32])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "granite", "gpt2", "opt", "biogpt", "mamba", "bloom"])
def test_the_epilogue_in_chunks_is_the_models_own(model_type: str, chunk: int) -> None:
    """Norm, head, caps and scales on any number of tokens, whatever positions they had. Rows of a product may differ in the last
    bits between matrices of different shapes: a sum of 32 products, 2 * 32 roundings of the largest."""
    model = real_model(tiny_config(BY_TYPE[model_type]))
    engine = make_engine(model)
    skeleton = engine.skeleton
    bound(skeleton, engine)
    captured: list[Any] = []
    _, layers = find_stack(model, model.config)
    layers[-1].register_forward_hook(lambda module, args, output: captured.append(hidden_of(output, args[0])))
    with torch.no_grad():
        logits = model(input_ids=micro_batches(1)[0].input_ids, use_cache=False).logits.flatten(0, 1)
        hidden = captured[0].flatten(0, 1)
        found = torch.cat([skeleton.logits(hidden[start : start + chunk]) for start in range(0, len(hidden), chunk)])
    assert float((found - logits).abs().max()) <= 64 * 2.0**-24 * float(logits.abs().max()) * 32**0.5
    engine.close()


def test_the_epilogue_leaves_the_gradient_mode_alone() -> None:
    engine = make_engine(real_model(tiny_config(BY_TYPE["gpt2"])))
    bound(engine.skeleton, engine)
    with torch.no_grad():
        engine.skeleton.logits(torch.zeros(3, 32))
        assert not torch.is_grad_enabled()
    engine.skeleton.logits(torch.zeros(3, 32))
    assert torch.is_grad_enabled()
    engine.close()


def test_the_prologue_shows_every_layer_its_inputs() -> None:
    engine = make_engine(real_model(tiny_config(BY_TYPE["gemma3_text"])))
    skeleton = engine.skeleton
    bound(skeleton, engine)
    ids = micro_batches(1)[0].input_ids
    hidden, calls = skeleton.prologue(Inputs(ids), EmbeddingTap(()))
    assert hidden.shape == (2, 16, 32) and len(calls) == 4
    window, whole = calls[0].kwargs["attention_mask"], calls[1].kwargs["attention_mask"]
    assert not torch.equal(window, whole)
    engine.close()


def test_before_head_is_what_the_head_is_given() -> None:
    engine = make_engine(real_model(tiny_config(BY_TYPE["llama"])))
    skeleton = engine.skeleton
    bound(skeleton, engine)
    hidden = torch.randn(5, 32)
    weight, bias = skeleton.head_weight()
    expected = skeleton.logits(hidden)
    found = nn.functional.linear(skeleton.before_head(hidden), weight, bias)
    assert torch.allclose(found, expected, rtol=0, atol=64 * 2.0**-24 * float(expected.abs().max()))
    engine.close()


# -------------------------------------------------------------------- guards


def test_no_stack_of_that_depth() -> None:
    model = build_on_meta(tiny_config(BY_TYPE["llama"]), dtype=torch.float32)
    model.config.num_hidden_layers = 7
    with pytest.raises(ModelRefused, match="no list of 7 layers"):
        Skeleton(model, decays=lambda *_: True, device=CPU)


def test_a_parameter_without_elements_is_named() -> None:
    model = build_on_meta(tiny_config(BY_TYPE["llama"], intermediate_size=0), dtype=torch.float32)
    with pytest.raises(ModelRefused, match=r"llama: model\.layers\.0\.mlp\.gate_proj\.weight has no elements \(0, \d+\)"):
        Skeleton(model, decays=lambda *_: True, device=CPU)


class Output:
    """A base model's output with nothing else in it."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def refused_by(change: Any) -> str:
    """The reason for which a llama whose forward was changed is refused."""
    model: Any = build_on_meta(tiny_config(BY_TYPE["llama"]), dtype=torch.float32)
    base = model.model
    original = type(base).forward
    base.forward = lambda *args, **kwargs: change(base, original, *args, **kwargs)
    with pytest.raises(ModelRefused) as caught:
        Skeleton(model, decays=lambda *_: True, device=CPU, fp32=True)
    return str(caught.value)


def test_hidden_states_changed_between_layers() -> None:
    def doubling(base: Any, original: Any, input_ids: Any, **kwargs: Any) -> Any:
        hidden = base.embed_tokens(input_ids)
        for layer in base.layers:
            hidden = layer(hidden) * 2
        raise AssertionError("not reached")

    assert "changed between the layers" in refused_by(doubling)


def test_hidden_states_that_skip_layers() -> None:
    def skipping(base: Any, original: Any, input_ids: Any, **kwargs: Any) -> Any:
        hidden = base.embed_tokens(input_ids)
        first = None
        for layer in base.layers:
            hidden = layer(hidden, extra=first)
            first = hidden if first is None else first
        return Output(base.norm(hidden))

    assert "also goes to other layers" in refused_by(skipping)


def test_hidden_states_that_skip_to_the_head() -> None:
    def to_the_head(base: Any, original: Any, input_ids: Any, **kwargs: Any) -> Any:
        hidden = base.embed_tokens(input_ids)
        total = torch.zeros(())
        for layer in base.layers:
            total = total + hidden
            hidden = layer(hidden)
        return Output(base.norm(hidden + total))

    assert "also goes to the head" in refused_by(to_the_head)


def test_state_handed_from_layer_to_layer_is_remembered_and_refused() -> None:
    script = StubScript(num_layers=3, tuple_length=2)
    hidden = torch.zeros(1, 2, 4)
    _, extra = script.play(0, (hidden,), {})
    assert extra == Extra(1)
    script.play(1, (hidden,), {"state": extra})
    assert script.calls[1].kwargs == {"state": None} and script.calls[0].onward == {1}
    with pytest.raises(ModelRefused, match="state besides"):
        hidden_of((hidden, torch.ones(3)), hidden, script.onward)
    assert hidden_of((hidden, None), hidden, script.onward) is hidden
    assert hidden_of((hidden, torch.ones(3)), hidden) is hidden  # nobody takes it up


def test_graph_leaves_finds_every_leaf_once() -> None:
    one, two, unused = (torch.zeros(2, requires_grad=True) for _ in range(3))
    found = graph_leaves([(one * two).sum() + one.sum(), two])
    assert {id(leaf) for leaf in found} == {id(one), id(two)} and id(unused) not in {id(leaf) for leaf in found}
