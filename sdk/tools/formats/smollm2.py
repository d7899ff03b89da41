"""SmolLM2: one block with a list of calls.

    <tool_call>[
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    ]</tool_call>

Source: instructions_function_calling.md of HuggingFaceTB/SmolLM2-1.7B-Instruct. The list is empty
if no tool fits. The chat template does not know tools: they belong in the system message.
"""

from __future__ import annotations

from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.rules import SPACE, CallRules, Rules
from sdk.tools.tagged import TAGS, TURN_ENDS, read_tagged


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(rules.json_call(tool) for tool in tools)
    calls = rules.list_of(call, parallel)
    return CallRules(f"{SPACE} {calls} {SPACE} {rules.mark('</tool_call>')}", "<tool_call>")


FORMAT = ToolFormat(
    name="smollm2",
    order=65,
    in_template=(("named SmolLM, trained by Hugging Face",),),
    triggers=tuple(TAGS),
    closing=TAGS,
    turn_ends=TURN_ENDS,
    read=read_tagged,
    rules=call_rules,
)
