"""Hermes 2 and 3, Qwen2.5, Qwen3, Granite 4 and many fine-tunes.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Several calls are several blocks. Sources: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B,
Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-8B and ibm-granite/granite-4.0-h-tiny; vLLM's
hermes_tool_parser.py.
"""

from __future__ import annotations

from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.rules import CallRules, Rules
from sdk.tools.tagged import TAGS, TURN_ENDS, read_tagged


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(rules.json_call(tool) for tool in tools)
    return rules.blocks("<tool_call>", call, "</tool_call>", parallel)


FORMAT = ToolFormat(
    name="hermes",
    order=70,
    in_template=(("<tool_call>",),),
    tokens=("<tool_call>",),
    triggers=tuple(TAGS),
    closing=TAGS,
    turn_ends=TURN_ENDS,
    read=read_tagged,
    rules=call_rules,
)
