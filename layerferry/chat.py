"""A conversation in the terminal with a model folder, through plain transformers: what was trained is what anyone else will load.

Prompts come from the tokenizer's own chat template, or from a LLaMA-Factory template when one is named; sampling defaults are
LLaMA-Factory's. Text appears as it is made. On a terminal it is a dialogue (``/clear`` forgets, ``/exit`` leaves); otherwise
every line of standard input is a message and its answer a paragraph of standard output.
Leaves out: tools, images, servers. Checked by ``tests/test_chat.py``.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

from layerferry.config import ChatConfig, Config, DataConfig
from layerferry.errors import CheckpointError, UserError

Turn = dict[str, str]


def chat(options: ChatConfig, *, prompt: str | None = None) -> None:
    """Answer ``prompt`` and return, or converse until the input ends."""
    talker = Talker(options)
    if prompt is not None:
        talker.say(prompt, _write)
        print()
        return
    for message in _messages():
        if message == "/exit":
            return
        if message == "/clear":
            talker.history.clear()
        elif message:
            talker.say(message, _write)
            print("\n" if sys.stdin.isatty() else "", flush=True)


class Talker:
    """A model, its tokenizer, and what has been said so far. ``history`` may be cleared by the caller."""

    def __init__(self, options: ChatConfig) -> None:
        from layerferry.data import tokenizer

        data = DataConfig(
            template=options.template or "auto", default_system=options.default_system, enable_thinking=options.enable_thinking
        )
        self.options = options
        self.model = _load_model(options)
        loaded = tokenizer.load(Config(model=options.model, data=data))
        self.tokenizer, self.template = loaded.tokenizer, loaded.template
        self.history: list[Turn] = []
        if self.template is None and not self.tokenizer.chat_template:
            name = options.model.model_name_or_path
            raise UserError(f"{name}: its tokenizer has no chat template: name one with template=NAME")

    def say(self, message: str, write: Callable[[str], None]) -> str:
        """Answer ``message``, handing text to ``write`` as it is made; both become part of the history."""
        self.history.append({"role": "user", "content": message})
        answer = self._generate(self.prompt_ids(), write)
        self.history.append({"role": "assistant", "content": answer})
        return answer

    def prompt_ids(self) -> list[int]:
        """Token ids that the answer to the last message continues."""
        options = self.options
        if self.template is not None:
            from layerferry.data.rows import ASSISTANT, USER, Conversation, Message

            roles = {"user": USER, "assistant": ASSISTANT}
            turns = [Message(role=roles[turn["role"]], content=turn["content"]) for turn in self.history]
            messages = (*turns, Message(role=ASSISTANT, content=""))
            pairs = self.template.encode_multiturn(self.tokenizer, Conversation(messages=messages), only_last=True)
            return [token for asked, answered in pairs[:-1] for token in (*asked, *answered)] + pairs[-1][0]
        system = [{"role": "system", "content": options.default_system}] if options.default_system else []
        thinking = {} if options.enable_thinking is None else {"enable_thinking": options.enable_thinking}
        from jinja2 import TemplateError

        try:
            rendered = self.tokenizer.apply_chat_template(
                [*system, *self.history], add_generation_prompt=True, return_dict=True, **thinking
            )
        except TemplateError as error:
            name = self.options.model.model_name_or_path
            raise UserError(f"{name}: its chat template fails ({error}): name one with template=NAME") from error
        return list(rendered["input_ids"])

    def _generate(self, ids: list[int], write: Callable[[str], None]) -> str:
        import torch

        batch = torch.tensor([ids], device=self.model.device)  # [1, T] int64 @device
        streamer = _streamer(self.tokenizer, write, self.options.skip_special_tokens) if self.options.num_beams == 1 else None
        with torch.inference_mode():
            output = self.model.generate(
                batch, attention_mask=torch.ones_like(batch), generation_config=self._generation_config(), streamer=streamer
            )
        answer: str = self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=self.options.skip_special_tokens)
        if streamer is None:
            write(answer)
        return answer

    def _generation_config(self) -> Any:
        from transformers import GenerationConfig

        options = self.options
        samples = options.do_sample and options.temperature > 0
        drawing = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k} if samples else {}
        beams = {"num_beams": options.num_beams, "length_penalty": options.length_penalty} if options.num_beams > 1 else {}
        return GenerationConfig(
            do_sample=samples,
            max_new_tokens=options.max_new_tokens,
            repetition_penalty=options.repetition_penalty,
            eos_token_id=self._stop_ids(),
            pad_token_id=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id,
            **drawing,
            **beams,
        )

    def _stop_ids(self) -> list[int]:
        """Ends of an answer: the tokenizer's, the model's, the named template's."""
        own = self.model.generation_config.eos_token_id
        words = self.template.stop_words if self.template is not None else ()
        found = {self.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
        found |= {self.tokenizer.convert_tokens_to_ids(word) for word in words}
        return sorted(token for token in found if token is not None)


def _load_model(options: ChatConfig) -> Any:
    from transformers import AutoModelForCausalLM

    from layerferry.models.build import config_of, reason

    model, name = options.model, options.model.model_name_or_path
    shared: dict[str, Any] = {
        "revision": model.model_revision,
        "trust_remote_code": model.trust_remote_code,
        "cache_dir": model.cache_dir,
    }
    config = config_of(model, None)  # a folder that is no model is named in our words
    try:
        loaded, found = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=options.infer_dtype,
            device_map="auto",
            use_safetensors=True,
            output_loading_info=True,
            **shared,
        )
    except Exception as error:  # a damaged file, a config that no model can be made of: of many libraries' classes
        raise CheckpointError(f"{name}: cannot be loaded: {reason(error)}") from error
    if missing := sorted(found["missing_keys"]):  # transformers would talk with random numbers in their place
        raise CheckpointError(f"{name}: cannot be loaded: {len(missing)} tensors are not in it: {missing[0]} ...")
    return loaded.eval()


def _streamer(tokenizer: Any, write: Callable[[str], None], skip_special_tokens: bool) -> Any:
    from transformers import TextStreamer

    class Writer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Writer(tokenizer, skip_prompt=True, skip_special_tokens=skip_special_tokens)


def _messages() -> Iterator[str]:
    """Lines of standard input; on a terminal with a prompt and line editing."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text would reach the tokenizer as halves of characters
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing for input()
    print("/clear forgets the conversation, /exit leaves", file=sys.stderr)
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return


def _write(text: str) -> None:
    print(text, end="", flush=True)
