"""Llama 3.1, 3.2 and 3.3: JSON, with or without the token ``<|python_tag|>``.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>brave_search.call(query="weather in Paris")
    <function=get_weather>{"city": "Paris"}</function>

Several calls are separated by ``;`` or line breaks. Without a mark, only names of tools make calls.
Sources: llama-models/models/llama3_1/prompt_format.md, the chat template of
meta-llama/Llama-3.1-8B-Instruct; vLLM's llama_tool_parser.py.
"""

from __future__ import annotations

import re

from sdk.tools import json_calls, python_calls
from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.rules import SPACE, CallRules, Rules
from sdk.tools.stream import Reads, TextStream

_NAME = re.compile(r"[^<>\s]")
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>")


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    if mark == "<function=":
        yield from _read_function(stream, builder)
        return
    yield from stream.space()
    if (yield from stream.at("{")):
        yield from json_calls.read_calls(
            stream, builder, known=not mark, separators=(";", ",", "<|python_tag|>")
        )
    elif (yield from stream.at("[")):
        yield from read_list(stream, builder, known=not mark)
    else:
        yield from python_calls.read_call(stream, builder)


def read_list(stream: TextStream, builder: MessageBuilder, *, known: bool) -> Reads[None]:
    """``[f(a=1)]`` or ``[{"name": ...}]``: the character after the bracket decides."""
    yield from stream.expect("[")
    yield from stream.space()
    if (yield from stream.at("{")):
        yield from json_calls.read_list_rest(stream, builder, known=known)
    else:
        yield from python_calls.read_list_rest(stream, builder)


def _read_function(stream: TextStream, builder: MessageBuilder) -> Reads[None]:
    """``name>{...}</function>``."""
    name = yield from stream.word(_NAME, 64)
    yield from stream.expect(">")
    builder.begin(name, known=False)
    stream.kept()
    yield from stream.space()
    yield from json_calls.read_value(stream, builder.arguments)
    builder.end()
    stream.keep()
    yield from stream.space()
    yield from stream.accept("</function>")


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(rules.json_call(tool, "parameters") for tool in tools)
    more = f' ({SPACE} ";" {SPACE} {call})*' if parallel else ""
    tag = rules.mark("<|python_tag|>")
    return CallRules(f"({tag})? {call}{more}", first="{<")


FORMAT = ToolFormat(
    name="llama_json",
    order=100,
    in_template=((": dictionary of argument name",), ("<|python_tag|>",)),
    tokens=("<|python_tag|>",),
    triggers=("<|python_tag|>", "<function="),
    closing={"<function=": "</function>"},
    bare="{[",
    turn_ends=TURN_ENDS,
    read=read,
    rules=call_rules,
)
