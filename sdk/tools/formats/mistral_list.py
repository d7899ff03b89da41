"""Mistral up to tokenizer version 7: a JSON list after a token.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "f0h9TBxQ1"}]

Sources: the chat templates of mistralai/Mistral-7B-Instruct-v0.3 and
mistralai/Mistral-Small-3.1-24B-Instruct-2503; vLLM's mistral_tool_parser.py.
"""

from __future__ import annotations

from sdk.tools.definitions import Tool
from sdk.tools.formats import mistral
from sdk.tools.rules import SPACE, CallRules, Rules


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(rules.json_call(tool, id_length=9) for tool in tools)
    return CallRules(f"{SPACE} {rules.list_of(call, parallel)}", "[TOOL_CALLS]")


FORMAT = mistral.FORMAT._replace(
    name="mistral_list",
    order=45,
    in_template=(("[TOOL_CALLS]",),),
    tokens=("[TOOL_CALLS]",),
    rules=call_rules,
)
