"""Tool lists and tool calls as text, in the formats of the model families.

The prompts in front of the lists are data (``templates.json``); how a list and a call are written is one small function
each. The forms are those that LLaMA-Factory 0.9.5 produces, odd ones included (a missing ``</tool_call>`` in glm4_moe, a
missing ``>`` in seed_oss), because exactly those texts were in the runs that users compare with. A format without functions
here is refused by name. Checked against LLaMA-Factory by ``tests/data/test_templates.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from layerferry.data.rows import BadRow


@dataclass(frozen=True, slots=True)
class Call:
    """One call: ``arguments`` is the decoded JSON value."""

    name: str
    arguments: Any

    @property
    def items(self) -> list[tuple[str, str]]:
        """Argument names with their values as text: strings bare, everything else as JSON."""
        if not isinstance(self.arguments, dict):
            raise BadRow("the arguments of a tool call are not an object")
        return [(key, value if isinstance(value, str) else dumps(value)) for key, value in self.arguments.items()]


def dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def today() -> str:
    """The date in llama3's tool prompt; LLaMA-Factory writes the day of the run there."""
    return datetime.now().strftime("%d %b %Y")


def parse_calls(text: str) -> list[Call]:
    """The content of a function message: one call or a list of calls, as JSON."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow("a function message is not JSON") from None
    calls: list[Call] = []
    for call in given if isinstance(given, list) else [given]:
        if not isinstance(call, dict) or "name" not in call or "arguments" not in call:
            raise BadRow("a function message lacks name or arguments")
        calls.append(Call(call["name"], call["arguments"]))
    return calls


def parse_tools(text: str) -> list[dict[str, Any]]:
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow("the tools are not JSON") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("the tools are not a list of objects")
    return tools


def bare(tool: dict[str, Any]) -> dict[str, Any]:
    """The function's own description, without the OpenAI wrapper."""
    inner = tool.get("function", tool) if tool.get("type") == "function" else tool
    if not isinstance(inner, dict) or "name" not in inner:
        raise BadRow("a tool has no name")
    return inner


def wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    return tool if tool.get("type") == "function" else {"type": "function", "function": tool}


def list_default(tools: list[dict[str, Any]], prompt: str) -> str:
    texts: list[str] = []
    for tool in map(bare, tools):
        parameters = tool.get("parameters")
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties"), dict):
            raise BadRow(f"tool {tool['name']} has no parameters")
        lines = [_parameter(name, given, parameters.get("required") or ()) for name, given in parameters["properties"].items()]
        about = tool.get("description", "")
        texts.append(f"> Tool Name: {tool['name']}\nTool Description: {about}\nTool Args:\n{''.join(lines)}\n")
    return prompt.format(tool_text="".join(texts), tool_names=", ".join(bare(tool)["name"] for tool in tools))


def _parameter(name: str, given: dict[str, Any], required: Any) -> str:
    enum, items = given.get("enum"), given.get("items")
    return (
        f"  - {name} ({given.get('type', '')}{', required' if name in required else ''}): {given.get('description', '')}"
        f"{', should be one of [' + ', '.join(map(str, enum)) + ']' if enum else ''}"
        f"{', where each item should be ' + str(items.get('type', '')) if items else ''}\n"
    )


def call_default(calls: list[Call]) -> str:
    return "\n".join(f"Action: {call.name}\nAction Input: {dumps(call.arguments)}" for call in calls)


def list_glm4(tools: list[dict[str, Any]], prompt: str) -> str:
    after = "在调用上述函数时，请使用 Json 格式表示调用的参数。"
    return prompt.format(tool_text="".join(f"\n\n## {tool['name']}\n\n{dumps(tool, 4)}\n{after}" for tool in map(bare, tools)))


def call_glm4(calls: list[Call]) -> str:
    if len(calls) != 1:
        raise BadRow("the glm4 format holds one tool call at a time")
    return f"{calls[0].name}\n{dumps(calls[0].arguments)}"


def list_llama3(tools: list[dict[str, Any]], prompt: str) -> str:
    return prompt.format(date=today(), tool_text="".join(f"{dumps(wrapped(tool), 4)}\n\n" for tool in tools))


def call_llama3(calls: list[Call]) -> str:
    objects = [{"name": call.name, "parameters": call.arguments} for call in calls]
    return dumps(objects[0] if len(objects) == 1 else objects)


def list_mistral(tools: list[dict[str, Any]], prompt: str) -> str:
    return f"[AVAILABLE_TOOLS] {dumps([wrapped(tool) for tool in tools])}[/AVAILABLE_TOOLS]"


def call_mistral(calls: list[Call]) -> str:
    return dumps(_objects(calls))


def list_wrapped_lines(tools: list[dict[str, Any]], prompt: str) -> str:
    return prompt.format(tool_text="".join(f"\n{dumps(wrapped(tool))}" for tool in tools))


def list_ling(tools: list[dict[str, Any]], prompt: str) -> str:
    return f"{list_wrapped_lines(tools, prompt)}\ndetailed thinking off"


def list_qwen3_5(tools: list[dict[str, Any]], prompt: str) -> str:
    return prompt.format(tool_text="".join(f"\n{dumps(bare(tool))}" for tool in tools))


def list_minimax1(tools: list[dict[str, Any]], prompt: str) -> str:
    return prompt.format(tool_text="".join(f"{dumps(bare(tool))}\n" for tool in tools))


def list_minimax2(tools: list[dict[str, Any]], prompt: str) -> str:
    return prompt.format(tool_text="".join(f"<tool>{dumps(bare(tool))}</tool>\n" for tool in tools))


def list_seed_oss(tools: list[dict[str, Any]], prompt: str) -> str:
    return prompt.format(tool_text=f"\n{dumps(tools)}")


def list_lfm2(tools: list[dict[str, Any]], prompt: str) -> str:
    return prompt.format(tool_text=dumps([bare(tool) for tool in tools]))


def call_qwen(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{dumps(call)}\n</tool_call>" for call in _objects(calls))


def call_glm4_moe(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        return f"\n<tool_call>{call.name}" + "".join(
            f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in call.items
        )

    return "\n".join(map(one, calls))


def call_qwen3_5(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.items)
        return f"<tool_call>\n<function={call.name}>\n{body}</function>\n</tool_call>"

    return "\n".join(map(one, calls))


def call_minimax1(calls: list[Call]) -> str:
    return "<tool_calls>\n" + "".join(f"{dumps(call)}\n" for call in _objects(calls)) + "</tool_calls>"


def call_minimax2(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        body = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in call.items)
        return f'<invoke name="{call.name}">\n{body}</invoke>'

    return "\n".join(map(one, calls))


def call_seed_oss(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        body = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in call.items)
        return f"\n<seed:tool_call>\n<function={call.name}\n{body}</function>\n</seed:tool_call>"

    return "\n".join(map(one, calls))


def call_lfm2(calls: list[Call]) -> str:
    def one(call: Call) -> str:
        if not isinstance(call.arguments, dict):
            raise BadRow("the arguments of a tool call are not an object")
        return f"{call.name}({', '.join(f'{key}={dumps(value)}' for key, value in call.arguments.items())})"

    return f"<|tool_call_start|>[{', '.join(map(one, calls))}]<|tool_call_end|>"


def _objects(calls: list[Call]) -> list[dict[str, Any]]:
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """``prompt`` names the text in ``templates.json``; the two functions fill it and write calls."""

    prompt: str
    list_text: Callable[[list[dict[str, Any]], str], str]
    call_text: Callable[[list[Call]], str]


FORMATS: dict[str, ToolFormat] = {
    "default": ToolFormat("default", list_default, call_default),
    "glm4": ToolFormat("glm4", list_glm4, call_glm4),
    "glm4_moe": ToolFormat("glm4_moe", list_wrapped_lines, call_glm4_moe),
    "lfm2": ToolFormat("lfm2", list_lfm2, call_lfm2),
    "ling": ToolFormat("ling", list_ling, call_qwen),
    "llama3": ToolFormat("llama3", list_llama3, call_llama3),
    "minimax1": ToolFormat("minimax_m1", list_minimax1, call_minimax1),
    "minimax2": ToolFormat("minimax_m2", list_minimax2, call_minimax2),
    "mistral": ToolFormat("mistral", list_mistral, call_mistral),
    "qwen": ToolFormat("qwen", list_wrapped_lines, call_qwen),
    "qwen3_5": ToolFormat("qwen35", list_qwen3_5, call_qwen3_5),
    "seed_oss": ToolFormat("seed", list_seed_oss, call_seed_oss),
}
