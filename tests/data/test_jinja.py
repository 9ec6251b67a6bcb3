"""``template: auto``: golden masks on templates written as the model families write theirs (FAULTS rows 13 and 14)."""

from __future__ import annotations

import pytest

from layerferry.data.jinja import JinjaEncoder
from layerferry.data.rows import BadRow, Conversation, Message
from layerferry.errors import DataError
from tests.data import lf

CHATML = lf.golden("chat_templates")["chatml"]
HEADERS = lf.golden("chat_templates")["headers"]
QWEN3_LIKE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' -%}
<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ answer }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
SYSTEM_IN_THE_LAST_QUESTION = (
    "{{ bos_token }}{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if s else messages %}{% for m in turns %}{% if m.role == 'user' %}"
    "{% set last = loop.last or (loop.index0 == turns | length - 2 and turns[-1].role == 'assistant') %}"
    "[INST] {{ s + '\n\n' + m.content if s and last else m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
PROMPT_OPENS_THOUGHT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turns(*contents: str, system: str = "") -> Conversation:
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[i % 2], content=content) for i, content in enumerate(contents))
    return Conversation(messages=messages, system=system, origin="rows.jsonl:3")


def shown(template: str, conversation: Conversation, **settings: object) -> str:
    """The row as text, trained runs in brackets; and the ids are the chat template's own."""
    tokenizer = lf.tokenizer()
    tokenizer.chat_template = template
    row = JinjaEncoder(tokenizer, 2048, **settings).encode(conversation)  # type: ignore[arg-type]
    text, trained = "", False
    for token, label in zip(row.input_ids, row.labels, strict=True):
        assert label in (token, -100)
        if (label >= 0) != trained:
            text += "⟧" if trained else "⟦"
            trained = not trained
        text += tokenizer.decode([token])
    return text + ("⟧" if trained else "")


def test_chatml() -> None:
    assert shown(CHATML, turns("q", "a", "r", "b", system="s")) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
    )


def test_headers_that_trim() -> None:
    assert shown(HEADERS, turns("q", " a \n", "r", "b")) == (
        "<s><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦a<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nr<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦b<|eot_id|>⟧"
    )


def test_thoughts_dropped_from_the_past() -> None:
    """The answer also stands in its own thought, and the past turn loses that thought."""
    asked = turns("q", "<think>\nmaybe a\n</think>\n\na", "r", "<think>\nb\n</think>\n\nb")
    assert shown(QWEN3_LIKE, asked) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n⟦<think>\nb\n</think>\n\nb<|im_end|>⟧\n"
    )


def test_empty_thought_is_trained_only_where_the_prompt_does_not_give_it() -> None:
    answer = "<think>\n\n</think>\n\n"
    assert shown(QWEN3_LIKE, turns("q", "a", "r", "b")).endswith(f"assistant\n⟦{answer}b<|im_end|>⟧\n")
    off = shown(QWEN3_LIKE, turns("q", "a", "r", "b"), enable_thinking=False)
    assert off.endswith(f"assistant\n{answer}⟦b<|im_end|>⟧\n")
    assert "assistant\n⟦a<|im_end|>⟧" in off


@pytest.mark.parametrize("settings", [{}, {"enable_thinking": False}])
def test_tool_calls(settings: dict[str, object]) -> None:
    text = shown(QWEN3_LIKE, lf.conversations()[4], **settings)
    assert (
        '⟦<tool_call>\n{"name": "tide", "arguments": {"port": "Süd", "hours": [6], "metric": true}}\n</tool_call><|im_end|>⟧'
        in text
    )
    assert "<|im_start|>tool\n" in text
    assert text.endswith("At six the water stands at 3.2 m.<|im_end|>⟧\n")


def test_system_text_that_moves_to_the_last_question() -> None:
    assert shown(SYSTEM_IN_THE_LAST_QUESTION, turns("q", "a", "r", "b", system="s")) == (
        "<s>[INST] q[/INST]⟦ a</s>⟧[INST] s\n\nr[/INST]⟦ b</s>⟧"
    )


def test_prompt_that_opens_a_thought() -> None:
    asked = turns("q", "<think>x</think>a", "r", "b")
    assert shown(PROMPT_OPENS_THOUGHT, asked) == "<s><｜User｜>q<｜Assistant｜>⟦a</s>⟧<｜User｜>r<｜Assistant｜>⟦b</s>⟧"


@pytest.mark.parametrize("answers", [("end", "im"), ("s", "</"), ("assistant", "user")])
def test_answers_that_look_like_marks(answers: tuple[str, str]) -> None:
    text = shown(CHATML, turns("q", answers[0], "r", answers[1]))
    assert f"assistant\n⟦{answers[0]}<|im_end|>⟧\n" in text
    assert f"assistant\n⟦{answers[1]}<|im_end|>⟧\n" in text


def test_generation_marks() -> None:
    asked = turns("q", "a", "r", "b", system="s")
    assert shown(MARKED, asked) == shown(CHATML, asked)
    assert shown(MARKED, asked, mask_history=True) == shown(CHATML, asked, mask_history=True)
    assert shown(CHATML, asked, mask_history=True).count("⟦") == 1


def test_default_system_and_train_on_prompt() -> None:
    assert shown(CHATML, turns("q", "a"), default_system="s") == shown(CHATML, turns("q", "a", system="s"))
    text = shown(CHATML, turns("q", "a"), train_on_prompt=True)
    assert text.startswith("⟦<|im_start|>user") and text.count("⟦") == 1


def test_cut_keeps_the_beginning() -> None:
    tokenizer = lf.tokenizer()
    whole = JinjaEncoder(tokenizer, 2048).encode(turns("q", "a long answer about the ferry"))
    cut = JinjaEncoder(tokenizer, 12).encode(turns("q", "a long answer about the ferry"))
    assert (cut.input_ids, cut.labels) == (whole.input_ids[:12], whole.labels[:12])
    with pytest.raises(BadRow, match="no trained token"):
        JinjaEncoder(tokenizer, 5).encode(turns("q", "a"))


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (
            MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last"),
            turns("q", "a", "r", "b"),
            "marks 1 of 2",
        ),
        (MARKED.replace("m.role == 'assistant'", "m.role == 'model'"), turns("q", "a"), "marks 0 of 1"),
        (CHATML.replace("{{ message.content }}", "{{ message.content | upper }}"), turns("q", "a", "r", "b"), None),
        ("{{ messages | length }}", turns("q", "a", "r", "b"), "rows.jsonl:3: template auto cannot find the tokens of message 1"),
        (CHATML, lf.conversations()[4], "writes no tools"),
        (CHATML, Conversation(messages=lf.conversations()[4].messages), "writes no tool calls"),
    ],
)
def test_never_a_silent_mask_of_zeros(template: str, conversation: Conversation, message: str | None) -> None:
    if message is None:  # a template may rewrite the answer: what it writes is trained
        assert "assistant\n⟦A<|im_end|>⟧" in shown(template, conversation)
        return
    with pytest.raises(DataError, match=message):
        shown(template, conversation)


def test_tokenizers_that_cannot_be_used() -> None:
    tokenizer = lf.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="needs a chat template"):
        JinjaEncoder(tokenizer, 10)


def test_a_row_that_the_template_refuses_is_a_bad_row() -> None:
    with pytest.raises(BadRow, match="the chat template refuses the row"):
        shown("{{ raise_exception('no') }}", turns("q", "a"))
