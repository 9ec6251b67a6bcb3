"""A conversation with a tiny random model: the oracle is transformers' own generate on the ids of the chat template."""

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from layerferry.chat import Talker, chat
from layerferry.config import ChatConfig, ModelConfig
from layerferry.errors import CheckpointError, UserError
from tests.saved_llama import save_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), more_rows=8)


def options(folder: Path, **changes: Any) -> ChatConfig:
    values = {"do_sample": False, "max_new_tokens": 8, "skip_special_tokens": False} | changes
    return ChatConfig(model=ModelConfig(model_name_or_path=str(folder)), **values)


def test_an_answer_is_what_transformers_generates(folder: Path) -> None:
    talker = Talker(options(folder, default_system="Be brief."))
    written: list[str] = []
    answer = talker.say("Who are you?", written.append)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    expected = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=[0, tokenizer.eos_token_id], pad_token_id=0)
    assert answer == tokenizer.decode(expected[0, ids.shape[1] :]) == "".join(written)


def test_a_conversation_with_stretched_positions(folder: Path) -> None:
    stretched = ModelConfig(model_name_or_path=str(folder), rope_scaling="linear")
    model = Talker(ChatConfig(model=stretched)).model
    plain = Talker(options(folder)).model
    assert model.config.max_position_embeddings == 2 * plain.config.max_position_embeddings
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq / 2)


def test_a_conversation_remembers(folder: Path) -> None:
    talker = Talker(options(folder))
    first = talker.say("One.", lambda text: None)
    talker.history.append({"role": "user", "content": "Two."})
    expected = [
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Two."},
    ]
    assert talker.history == expected
    assert (
        talker.prompt_ids()
        == talker.tokenizer.apply_chat_template(expected, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def test_a_named_template_renders_the_prompt(folder: Path) -> None:
    """The oracle is the template as its documentation has it: alpaca's headings around the words."""
    talker = Talker(options(folder, template="alpaca", default_system="S\n\n"))
    for role, content in (("user", "Hello"), ("assistant", "Hi"), ("user", "Bye")):
        talker.history.append({"role": role, "content": content})
    eos = talker.tokenizer.eos_token
    expected = f"S\n\n### Instruction:\nHello\n\n### Response:\nHi{eos}\n\n### Instruction:\nBye\n\n### Response:\n"
    assert talker.tokenizer.decode(talker.prompt_ids()) == expected


@pytest.mark.parametrize("changes", [{"num_beams": 2}, {"do_sample": True, "temperature": 0.0}, {"do_sample": True}])
def test_every_way_to_draw_writes_what_it_returns(folder: Path, changes: dict[str, Any]) -> None:
    written: list[str] = []
    answer = Talker(options(folder, **changes)).say("Hi", written.append)
    assert answer == "".join(written) and answer


def test_lines_of_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("One.\n\n/clear\nOne.\n/exit\nnever said\n"))
    chat(options(folder, skip_special_tokens=True))
    first, second = _halves(capsys.readouterr().out)
    assert first == second != ""


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def test_one_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat(options(folder), prompt="One.")
    assert capsys.readouterr().out == Talker(options(folder)).say("One.", lambda text: None) + "\n"


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def test_damaged_weights_are_named(tmp_path: Path, folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for number, content in enumerate((whole[:-100], whole[:50], b"", b"version https://git-lfs.github.com/spec/v1\n" * 3)):
        damaged = copy_of(folder, tmp_path / str(number))
        (damaged / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{damaged}: cannot be loaded: "):
            Talker(options(damaged))


def test_missing_weights_are_not_made_up(tmp_path: Path, folder: Path) -> None:
    part = copy_of(folder, tmp_path / "part")
    tensors = load_file(part / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="1 tensors are not in it: model.layers.1.mlp.up_proj.weight"):
        Talker(options(part))
    pickled = copy_of(folder, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be loaded: .*safetensors"):
        Talker(options(pickled))


@pytest.mark.parametrize("text", ["{% for %}", "{{ raise_exception('no such thing') }}"])
def test_a_chat_template_that_fails_is_named(tmp_path: Path, folder: Path, text: str) -> None:
    broken = copy_of(folder, tmp_path / "broken")
    (broken / "chat_template.jinja").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=f"{broken}: its chat template fails .*: name one with template=NAME"):
        Talker(options(broken)).say("Hi", lambda text: None)


def test_input_that_is_no_text(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bytes_in = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", bytes_in)
    chat(options(folder))
    assert capsys.readouterr().out


def test_what_is_no_model_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no usable config.json"):
        Talker(options(tmp_path))
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(bare)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    with pytest.raises(UserError, match="no chat template: name one with template=NAME"):
        Talker(options(bare))
