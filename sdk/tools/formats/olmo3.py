"""Olmo 3: calls in Python, one per line, between tags.

    <function_calls>
    get_weather(city="Paris")
    </function_calls>

The block is a call only if it consists of calls of the tools with literal arguments. Sources: the
chat template of allenai/Olmo-3-7B-Instruct; vLLM's olmo3_tool_parser.py.
"""

from __future__ import annotations

from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.python_calls import read_code
from sdk.tools.rules import SPACE, CallRules, Rules
from sdk.tools.stream import Reads, TextStream
from sdk.tools.tagged import TURN_ENDS

_OPENING = "<function_calls>"
_CLOSING = "</function_calls>"


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    yield from read_code(stream, builder, _CLOSING)


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(rules.python_call(tool) for tool in tools)
    more = f' ("\\n" {call})*' if parallel else ""
    return CallRules(f"{SPACE} {call}{more} {SPACE} {rules.mark(_CLOSING)}", _OPENING)


FORMAT = ToolFormat(
    name="olmo3",
    order=75,
    in_template=((_OPENING,),),
    triggers=(_OPENING,),
    turn_ends=TURN_ENDS,
    read=read,
    rules=call_rules,
)
