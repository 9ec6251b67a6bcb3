"""Checkpoints of every optimizer format: exact resumption, and what becomes of one that is taken up in another format."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from layerferry.engine.engine import Engine
from layerferry.errors import CheckpointError
from layerferry.optim.blocks import decode
from tests.checkpoint.tiny import PLANS, assert_same, engine_of, load, model_of, save, state_of, train
from tests.optim.every_format import EVERY_FORMAT, RULES


def decoded(engine: Engine, kind: str) -> dict[str, torch.Tensor]:
    """fp32 numbers of a plane of codes, by parameter."""
    found = {}
    for unit in engine.store.units:
        plane = engine.store.plane(unit, kind)
        for entry in unit.layout.entries:
            section = decode(plane.sections[entry.dtype], plane.exponents[entry.dtype], signed=kind == "exp_avg")
            found[unit.names[entry.name]] = section[entry.offset : entry.offset + entry.numel].view(entry.shape)
    return found


CHAINS = (("streamed", "home", "disk"), ("disk", "home", "streamed"))
"""Between them every place leads to every other."""


@pytest.mark.parametrize("chain", CHAINS, ids=", ".join)
@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_resumption_is_exact(tmp_path: Path, name: str, chain: tuple[str, ...]) -> None:
    """Each step under another plan, with units @host, @device and @disk: saved codes and the counted random numbers are all
    there is."""
    model, optim = model_of("qwen3_moe" if "8bit" in name else "llama"), EVERY_FORMAT[name]
    whole = engine_of(model, **optim)
    losses = train(whole, range(3))
    one = engine_of(model, PLANS[chain[0]], **optim)
    for step, place in enumerate(chain):
        if step:
            saved = save(one, tmp_path, step)
            assert saved.fault is None
            before, one = one, load(model, saved.folder, PLANS[place], **optim)
            assert_same(state_of(one), state_of(before))
            before.close()
        assert train(one, range(step, step + 1)) == losses[step : step + 1]
    assert_same(state_of(one), state_of(whole))


PARTLY = ("layers.0.input_layernorm", "layers.1.mlp", "model.norm")
"""Of one layer a vector alone, of another some matrices, of the last unit a vector beside a frozen table; the first is frozen."""


@pytest.mark.parametrize("rule", RULES)
def test_frozen_parameters_beside_every_rule(tmp_path: Path, rule: str) -> None:
    """The bits of a run in one place, whatever a unit has left to train, and the weights of what is frozen stay."""
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(f"model.{part}" for part in PARTLY[:2]) + PARTLY[2:]))
    whole, one = engine_of(model, **RULES[rule]), engine_of(model, PLANS["disk"], **RULES[rule])
    losses = train(whole, range(2))
    assert train(one, range(1)) == losses[:1]
    again = load(model, save(one, tmp_path, 1).folder, PLANS["home"], **RULES[rule])
    assert_same(state_of(again), state_of(one))
    assert train(again, range(1, 2)) == losses[1:]
    assert_same(state_of(again), state_of(whole))
    after = state_of(again)
    for name, parameter in model.named_parameters():
        assert torch.equal(after[f"master {name}"], parameter.float()) != parameter.requires_grad


def test_moments_are_encoded_and_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """fp32 -> 8 bit within 1/16 of each number or the smallest code; 8 bit -> fp32 exactly what the codes say. The masters: bf16
    and 24 bits are what rounding to nearest leaves of fp32, and the way back adds nothing."""
    model = model_of()
    wide = engine_of(model)
    train(wide, range(2))
    with caplog.at_level(logging.WARNING):
        lean = load(model, save(wide, tmp_path, 2).folder, optim="adamw_8bit")
    assert "moments are converted: exp_avg F32, exp_avg_sq F32 becomes exp_avg U8/128, exp_avg_sq U8/128" in caplog.text
    before, after = state_of(wide), state_of(lean)
    for unit in lean.store.units:
        for entry in unit.layout.entries:
            name = unit.names[entry.name]
            master, kept = before[f"master {name}"], after[f"master {name}"]
            assert bool(((master - kept).abs() <= 2.0**-16 * master.abs()).all())
            for kind, octaves in (("exp_avg", 16), ("exp_avg_sq", 32)):
                value, found = before[f"{kind} {name}"], decoded(lean, kind)[name]
                smallest = value.abs().max() * 2.0 ** (2 - octaves)
                assert bool(((found - value).abs() <= torch.maximum(value.abs() / 16, smallest)).all())
    (tmp_path / "lean").mkdir()
    back = load(model, save(lean, tmp_path / "lean", 2).folder)
    again = load(model, save(back, tmp_path, 2).folder, optim="adamw_8bit")
    for name, value in state_of(back).items():
        kind, parameter = name.split(" ")
        kept = state_of(again)[name] if kind == "master" else decoded(again, kind)[parameter]
        assert torch.equal(value, after[name] if kind == "master" else decoded(lean, kind)[parameter])
        assert torch.equal(value, kept), "the exponent of a block may be another, its numbers are the same"
    assert all(torch.isfinite(torch.tensor(train(engine, range(2, 3)))).all() for engine in (back, again))


@pytest.mark.parametrize("fp32", [False, True])
def test_a_bf16_master_becomes_a_whole_one_and_back(tmp_path: Path, fp32: bool) -> None:
    model = model_of()
    bare = engine_of(model, master_weights="bf16")
    train(bare, range(2))
    whole = load(model, save(bare, tmp_path, 2).folder, fp32=fp32)
    assert_same(state_of(whole), state_of(bare))
    (tmp_path / "whole").mkdir()
    assert_same(state_of(load(model, save(whole, tmp_path / "whole", 2).folder, master_weights="bf16")), state_of(bare))


def test_the_moments_of_another_rule_are_refused(tmp_path: Path) -> None:
    model = model_of()
    engine = engine_of(model, optim="lion_8bit")
    train(engine, range(1))
    folder = save(engine, tmp_path, 1).folder
    with pytest.raises(CheckpointError, match="its optimizer kept exp_avg U8/128, this run's keeps exp_avg F32, exp_avg_sq F32"):
        load(model, folder)


def test_the_momentum_of_muon_is_encoded_and_decoded(tmp_path: Path) -> None:
    """Of matrices alone, each in blocks of its own; what belongs to AdamW is of 8 bits on both sides and stays."""
    model = model_of("qwen3_moe")
    lean = engine_of(model, optim="muon_8bit")
    train(lean, range(2))
    wide = load(model, save(lean, tmp_path, 2).folder, optim="muon")
    before, after = state_of(lean), state_of(wide)
    for unit in lean.store.units:
        plane = lean.store.plane(unit, "momentum_buffer")
        for entry in (entry for entry in unit.layout.entries if plane.holds(entry)):
            codes, name = plane.whole_blocks(entry), unit.names[entry.name]
            assert codes is not None
            values = decode(codes, plane.exponents_of(entry), signed=True)[: entry.numel].view(entry.shape)
            assert torch.equal(after[f"momentum_buffer {name}"], values)
    kept = [name for name in before if name.startswith(("master", "exp_avg"))]
    assert_same({name: after[name] for name in kept}, {name: before[name] for name in kept})
    with pytest.raises(CheckpointError, match="its optimizer kept momentum_buffer U8/128, exp_avg U8/128, exp_avg_sq U8/128"):
        load(model, tmp_path / "checkpoint-2", optim="adamw_8bit")
