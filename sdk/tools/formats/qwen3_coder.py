"""Qwen3-Coder and Qwen3.5: parameters are text between tags, with the types of the schema.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The line breaks next to the tags are not part of a value. The model sometimes leaves out the outer
tags. Sources: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen/Qwen3.5-9B; vLLM's
qwen3coder_tool_parser.py.
"""

from __future__ import annotations

from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.rules import SPACE, CallRules, Rules, parameters_of, required_of
from sdk.tools.tagged import TAGS, TURN_ENDS, read_tagged
from sdk.tools.values import parameter_schema, types_of


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(_call(rules, tool) for tool in tools)
    return rules.blocks("<tool_call>", call, "</tool_call>", parallel)


def _call(rules: Rules, tool: Tool) -> str:
    """The parameters in the order of the schema."""
    required = required_of(tool)
    parts = [rules.literal(f"<function={tool.name}>")]
    for name in parameters_of(tool):
        parameter = rules.add("parameter", f"{SPACE} {_parameter(rules, tool, name)}")
        parts.append(parameter if name in required else f"({parameter})?")
    return rules.add("call", f'{" ".join(parts)} {SPACE} "</function>"')


def _parameter(rules: Rules, tool: Tool, name: str) -> str:
    schema = parameter_schema(tool.parameters, name)
    opening = rules.literal(f"<parameter={name}>\n")
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(one, str) for one in choices):
        values = rules.any_of(map(rules.literal, choices))
    elif types_of(schema) in (None, {"string"}):
        return f"{opening} {rules.text_until('</parameter>')}"
    else:
        values = rules.json(schema)
    return f'{opening} {values} "\\n</parameter>"'


FORMAT = ToolFormat(
    name="qwen3_coder",
    order=50,
    in_template=(("<function=", "<parameter="),),
    triggers=tuple(TAGS),
    closing=TAGS,
    turn_ends=TURN_ENDS,
    read=read_tagged,
    rules=call_rules,
)
