"""Granite 3: a list of calls after a token; also Phi-4-mini, and Granite 20B's single calls.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}

Sources: the chat template of ibm-granite/granite-3.3-8b-instruct; vLLM's granite_tool_parser.py,
granite_20b_fc_tool_parser.py and phi4mini_tool_parser.py. Granite 4 writes as Hermes does.
"""

from __future__ import annotations

from sdk.tools import json_calls
from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.rules import SPACE, CallRules, Rules
from sdk.tools.stream import Reads, TextStream


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    yield from stream.space()
    yield from json_calls.read_calls(stream, builder, known=not mark)
    yield from stream.space()
    yield from stream.accept("</tool_call>", "<|/tool_call|>")


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(rules.json_call(tool) for tool in tools)
    return CallRules(f"{SPACE} {rules.list_of(call, parallel)}", "<|tool_call|>")


FORMAT = ToolFormat(
    name="granite_list",
    order=110,
    in_template=(("<|tool_call|>",), ("<|start_of_role|>",), ("<function_call>",)),
    tokens=("<|tool_call|>",),
    triggers=("<|tool_call|>", "<tool_call>", "<function_call>"),
    closing={"<tool_call>": "</tool_call>"},
    bare="[",
    turn_ends=("<|end_of_text|>", "<|end_of_role|>", "<|end|>"),
    read=read,
    rules=call_rules,
)
