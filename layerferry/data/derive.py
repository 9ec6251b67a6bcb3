"""``template: null``: slots found by rendering the tokenizer's chat template on marked messages, as LLaMA-Factory does.

The result is an approximation by construction (one user slot, one assistant slot, one system slot); ``template: auto``
renders the chat template itself. A chat template that refuses the marked conversations is an error that says so. Checked
against LLaMA-Factory by ``tests/data/test_derive.py``.
"""

from __future__ import annotations

from typing import Any

from layerferry.data import templates
from layerferry.data.templates import CONTENT, Slots, Template
from layerferry.errors import DataError


def derive(tokenizer: Any) -> Template:
    """The template of ``tokenizer``'s chat template; ``empty`` where it has none."""
    if not isinstance(tokenizer.chat_template, str):
        return templates.load("empty")
    prefix = tokenizer.decode(tokenizer.encode(""))
    try:
        system = _render(tokenizer, [("system", CONTENT)], prefix)
        empty_system_user = _render(tokenizer, [("system", ""), ("user", CONTENT)], prefix)
        user = _render(tokenizer, [("user", CONTENT)], prefix)
        both = _render(tokenizer, [("user", CONTENT), ("assistant", CONTENT)], prefix)
    except Exception as error:  # jinja2 and the template's own raise_exception
        reason = str(error).splitlines()[0]
        raise DataError(
            f"no template can be had from the tokenizer's chat template ({reason}): set template to a name, or auto"
        ) from None
    assistant = both[len(user) :]
    reasons = "<think>" in assistant
    assistant = assistant.replace("<think>", "").replace("</think>", "").lstrip("\n")
    default_system = ""
    if len(user) > len(empty_system_user):
        default_system = _additions(empty_system_user, user)
        user = user[len(system.replace(CONTENT, default_system, 1)) :]
    return Template(
        name="null (from the tokenizer)",
        kind="reasoning" if reasons else "plain",
        user=(user,),
        assistant=(assistant,),
        system=(system,),
        function=(assistant,),
        observation=(user,),
        prefix=_prefix(prefix),
        default_system=default_system,
        stop_words=(),
        thought_words=("<think>\n", "\n</think>\n\n"),
        tool_call_words=("<tool_call>", "</tool_call>"),
        efficient_eos=False,
        replace_eos=False,
        tool_call_format="default",
        tool_list_format="default",
    )


def _render(tokenizer: Any, turns: list[tuple[str, str]], prefix: str) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    asks = turns[-1][0] == "user"
    text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False)
    return text[len(prefix) :]


def _prefix(prefix: str) -> Slots:
    return (prefix,) if prefix else ()


def _additions(shorter: str, longer: str) -> str:
    """The characters of ``longer`` that are not matched, in order, by ``shorter``."""
    index, found = 0, ""
    for position, letter in enumerate(longer):
        if index == len(shorter):
            break
        if shorter[index] == letter:
            index += 1
        else:
            found += longer[position]
    return found
