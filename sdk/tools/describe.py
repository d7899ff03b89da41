"""Tools for chat templates that do not know them: in words, in the system message.

The templates of SmolLM2 and Gemma 3 are among them. Calls and results of earlier turns become text
too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.messages import arguments_of

Message = Mapping[str, Any]

_TEXT = """You can call these functions:
{tools}
To call functions, answer only with {example}. Otherwise answer as usual."""


def describe_tools(tools: Iterable[Tool], format: ToolFormat) -> str:
    """The text that tells a model its tools, and how ``format`` writes calls."""
    lines = "\n".join(json.dumps(tool.as_dict()["function"]) for tool in tools)
    example = _calls(format, ['{"name": "FUNCTION", "arguments": {"NAME": VALUE}}'])
    if format.name == "gemma_text":
        example = "[FUNCTION(NAME=VALUE)]"
    return _TEXT.format(tools=lines, example=example)


def with_described_tools(
    messages: Sequence[Message], tools: Sequence[Tool], format: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation with tools, calls and results as text."""
    described = [_as_text(message, format) for message in messages]
    if not tools:
        return described
    text = describe_tools(tools, format)
    first = described[0] if described else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        described[0] = {**first, "content": f"{first['content']}\n\n{text}"}
        return described
    return [{"role": "system", "content": text}, *described]


def _as_text(message: Message, format: ToolFormat) -> dict[str, Any]:
    """A message without tool calls and results."""
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    if message.get("role") == "tool":
        name = message.get("name") or message.get("tool_call_id") or "the function"
        before, content = f"Result of {name}: ", message.get("content")
        if isinstance(content, list | tuple):
            return {"role": "user", "content": [{"type": "text", "text": before}, *content]}
        return {"role": "user", "content": f"{before}{content}"}
    calls = message.get("tool_calls")
    if calls:
        written = _calls(format, [_call(call, format) for call in calls])
        content = message.get("content")
        if isinstance(content, list | tuple):
            plain["content"] = [*content, {"type": "text", "text": written}]
        else:
            plain["content"] = "\n".join(filter(None, (content, written)))
    return plain


def _call(call: Mapping[str, Any], format: ToolFormat) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = arguments_of(arguments)
        except ValueError:  # a broken call: as the model wrote it
            return str(arguments)
    if format.name == "gemma_text":
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return f"{function['name']}({given})"
    return json.dumps({"name": function["name"], "arguments": arguments})


def _calls(format: ToolFormat, calls: Sequence[str]) -> str:
    """Calls as the format writes them."""
    if format.name == "smollm2":
        return f"<tool_call>[{', '.join(calls)}]</tool_call>"
    if format.name == "gemma_text":
        return f"[{', '.join(calls)}]"
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)
