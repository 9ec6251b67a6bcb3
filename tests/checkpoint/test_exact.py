"""N steps = k + save + load + (N - k), bit for bit: for every k, under every plan, in every family and between element types."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from layerferry.backends.chaos import ChaosBackend
from layerferry.checkpoint import checksum, manifest
from layerferry.checkpoint.save import Saver
from layerferry.errors import CheckpointError
from layerferry.plan import Plan
from layerferry.store.safetensors_file import CheckpointFolder
from tests.checkpoint.faults import BreakingFiles
from tests.checkpoint.tiny import PLANS, RUN, assert_same, engine_of, finished, load, model_of, save, state_of, train

STEPS = 3


@pytest.mark.parametrize("fp32", [False, True])
def test_every_step(tmp_path: Path, fp32: bool) -> None:
    model = model_of()
    whole = engine_of(model, fp32=fp32)
    losses = train(whole, range(STEPS))
    expected = state_of(whole)
    for k in range(STEPS):
        first = engine_of(model, fp32=fp32)
        train(first, range(k))
        saved = save(first, tmp_path, k)
        assert saved.fault is None
        second = load(model, saved.folder, fp32=fp32)
        assert second.num_steps == k
        assert train(second, range(k, STEPS)) == losses[k:]
        assert_same(state_of(second), expected)


@pytest.mark.parametrize(("before", "after"), zip(PLANS, [*PLANS][1:] + [*PLANS][:1], strict=True))
def test_another_plan(tmp_path: Path, before: str, after: str) -> None:
    model = model_of()
    first = engine_of(model, PLANS[before])
    train(first, range(2))
    saved = save(first, tmp_path, 2)
    second = load(model, saved.folder, PLANS[after])
    assert_same(state_of(second), state_of(first))
    assert train(second, range(2, 3)) == train(first, range(2, 3))
    assert_same(state_of(second), state_of(first))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {"tie_word_embeddings": True}), ("gpt2", {}), ("qwen3_moe", {}), ("deepseek_v3", {}), ("gpt_oss", {})],
)
def test_families(tmp_path: Path, family: str, changes: dict[str, bool]) -> None:
    """Tied ends, Conv1D, experts that are split on the disk, fp32-only parameters and persistent buffers."""
    model = model_of(family, **changes)
    first = engine_of(model)
    train(first, range(2))
    saved = save(first, tmp_path, 2)
    second = load(model_of(family, **changes), saved.folder, PLANS["home"])
    assert_same(state_of(second), state_of(first))
    assert train(second, range(2, 4)) == train(first, range(2, 4))
    assert_same(state_of(second), state_of(first))


@pytest.mark.parametrize(
    ("family", "at"), [("qwen3_moe", 12), ("qwen3_moe", 20), ("gpt2", 12), ("gpt_oss", 14), ("deepseek_v3", 20)]
)
def test_nothing_of_a_checkpoint_that_failed_is_in_the_next(
    tmp_path: Path, family: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted tensors are copies: those that a failed save has made must not be written later. Small chunks, so that several
    threads write one tensor."""
    monkeypatch.setattr(checksum, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 4096)
    engine = engine_of(model_of(family))
    train(engine, range(1))
    assert save(engine, tmp_path, 1, files=BreakingFiles(at, errno.ENOSPC, lasting=True)).fault is not None
    train(engine, range(1, 2))
    saved = save(engine, tmp_path, 2)
    assert_same(state_of(load(model_of(family), saved.folder)), state_of(engine))


def test_updates_on_arrival_are_saved_and_taken_up_by_other_plans(tmp_path: Path) -> None:
    """Written while the next steps are taken: a unit that is being read is not updated, and its gradient waits in its buffer."""
    model, arriving = model_of(), replace(PLANS["streamed"], on_arrival=True)
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        engine = engine_of(model, arriving, backend=ChaosBackend(seed), max_grad_norm=0.0)
        train(engine, range(2))
        saver = Saver(engine, folder, run=RUN, spare_bytes=partial(int, 300_000 * seed))
        saver.start(2, {})
        train(engine, range(2, 4))
        saved = saver.take_outcome(wait=True)
        assert saved is not None and saved.fault is None
        saver.close()
        for plan in (arriving, PLANS["streamed"]):
            again = load(model, saved.folder, plan, max_grad_norm=0.0)
            train(again, range(2, 4))
            assert_same(state_of(again), state_of(engine))
            again.close()
        engine.close()


def test_gradient_planes_of_four_bytes(tmp_path: Path) -> None:
    """The carry changes what is computed next, not what was saved: gradients are no state."""
    model = model_of()
    first = engine_of(model, Plan(num_waves=2, carry_fp32=True))
    train(first, range(2))
    assert_same(state_of(load(model, save(first, tmp_path, 2).folder)), state_of(first))


@pytest.mark.parametrize("from_fp32", [False, True])
def test_split_and_whole_masters_become_each_other(tmp_path: Path, from_fp32: bool) -> None:
    """The masters' fp32 bits and the moments pass unchanged; what is computed afterwards is another type's arithmetic."""
    model = model_of()
    first = engine_of(model, fp32=from_fp32)
    train(first, range(3))
    saved = save(first, tmp_path, 3)
    second = load(model, saved.folder, fp32=not from_fp32)
    assert_same(state_of(second), state_of(first))


def test_plain_transformers_loads_the_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = model_of("qwen3_moe")
    engine = engine_of(model)
    train(engine, range(2))
    saved = save(engine, tmp_path, 2)
    engine.folder.write_config(saved.folder, engine.store)
    engine.save_pretrained(tmp_path / "export")
    found = AutoModelForCausalLM.from_pretrained(saved.folder).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in expected)


def test_training_while_it_is_written_under_a_hostile_backend(tmp_path: Path) -> None:
    """No race between writer, worker and lanes (``chaos`` raises on one), and the checkpoint is step 2 although 3 and 4 ran."""
    model = model_of()
    for seed in range(3):  # with room for no copies, for some, for all
        folder = tmp_path / str(seed)
        folder.mkdir()
        engine = engine_of(model, PLANS["home"], backend=ChaosBackend(seed))
        train(engine, range(2))
        saver = Saver(engine, folder, run=RUN, spare_bytes=partial(int, 200_000 * seed))
        saver.start(2, {})
        train(engine, range(2, 4))
        finished(saver, model, 2)
        engine.close()


def test_another_model_is_refused(tmp_path: Path) -> None:
    engine = engine_of(model_of())
    train(engine, range(1))
    saved = save(engine, tmp_path, 1)
    with pytest.raises(CheckpointError):
        load(model_of(num_hidden_layers=3), saved.folder)


FREEZES = {"the last layer": "layers.1.", "mlp": ".mlp.", "the embedding": "embed_tokens"}


@pytest.mark.parametrize("part", FREEZES.values(), ids=FREEZES)
def test_frozen_parameters_have_no_state_and_come_back(tmp_path: Path, part: str) -> None:
    def frozen() -> Any:
        model = model_of()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part in name)
        return model

    first = engine_of(frozen())
    train(first, range(2))
    saved = save(first, tmp_path, 2)
    files = [CheckpointFolder(path) for path in saved.folder.glob("state-*.safetensors")]
    with_state = {name.split(".", 1)[1] for file in files for name in file.names}
    assert with_state == {name for name, _ in frozen().named_parameters() if part in name}
    second = load(frozen(), saved.folder, PLANS["home"])
    assert_same(state_of(second), state_of(first))
    assert train(second, range(2, 4)) == train(first, range(2, 4))
    assert_same(state_of(second), state_of(first))
    with pytest.raises(CheckpointError, match=r"other trained parameters: only this run trains .*finetuning_type and freeze_"):
        load(model_of(), saved.folder)


def test_a_checkpoint_of_more_trained_parameters_is_refused(tmp_path: Path) -> None:
    first = engine_of(model := model_of())
    saved = save(first, tmp_path, 0)
    model.model.embed_tokens.weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"other trained parameters: only it trains model.embed_tokens.weight: resume"):
        load(model, saved.folder)


@pytest.mark.parametrize("fp32", [False, True], ids=["bf16", "fp32"])
def test_other_trained_parameters_are_refused_where_the_optimizer_keeps_nothing(tmp_path: Path, fp32: bool) -> None:
    """Plain SGD has no moments, and in fp32 no residues: no name in a state file tells what was trained."""

    def partly(*trained: str) -> Any:
        model = model_of()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained))
        return model

    plan = replace(PLANS["home"], fp32=fp32)
    first = engine_of(partly("layers.1.mlp"), plan, optim="sgd", fp32=fp32)
    train(first, range(1))
    saved = save(first, tmp_path, 1)
    assert_same(state_of(load(partly("layers.1.mlp"), saved.folder, plan, optim="sgd", fp32=fp32)), state_of(first))
    up = r"model\.layers\.1\.mlp\."
    for now, message in {
        ("layers.1.mlp", "layers.0.mlp"): r"only this run trains model\.layers\.0\.mlp\.down_proj.weight and 2 more: resume",
        ("layers.1.mlp.up",): rf"only it trains {up}down_proj\.weight and 1 more: resume",
        ("embed",): rf"only it trains {up}down_proj.weight and 2 more; only this run trains model\.embed_tokens\.weight: resume",
    }.items():
        with pytest.raises(CheckpointError, match=rf"other trained parameters: {message}"):
            load(partly(*now), saved.folder, plan, optim="sgd", fp32=fp32)
