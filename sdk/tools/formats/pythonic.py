"""Llama 3.2 and 4, ToolACE and others: a Python list of calls.

    [get_weather(city="Paris"), get_time(zone="CET")]

Llama 4 may write it between ``<|python_start|>`` and ``<|python_end|>``. Without these marks, only
names of tools make calls. Sources: llama-models/models/llama3_2/text_prompt_format.md and
models/llama4/prompt_format.md; vLLM's llama4_pythonic_tool_parser.py and the templates
tool_chat_template_llama3.2_pythonic.jinja and tool_chat_template_llama4_pythonic.jinja.
"""

from __future__ import annotations

from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.formats import llama
from sdk.tools.rules import CallRules, Rules
from sdk.tools.stream import Reads, TextStream


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    yield from llama.read(stream, builder, mark)
    if mark == "<|python_start|>":
        yield from stream.space()
        yield from stream.accept("<|python_end|>")


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(rules.python_call(tool) for tool in tools)
    return CallRules(rules.list_of(call, parallel), first="[")


FORMAT = ToolFormat(
    name="pythonic",
    order=90,
    in_template=(("[func_name1(",),),
    tokens=("<|python_start|>",),
    triggers=("<|python_start|>", "<|python_tag|>"),
    closing={"<|python_start|>": "<|python_end|>"},
    bare="[{",
    turn_ends=llama.TURN_ENDS,
    read=read,
    rules=call_rules,
)
