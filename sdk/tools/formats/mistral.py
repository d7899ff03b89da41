"""Mistral from tokenizer version 11 on: the name and the arguments after tokens.

    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{"zone": "CET"}

Version 11 has ``[CALL_ID]`` and an id before ``[ARGS]``. If ``[ARGS]`` was removed from the text,
the name ends at the brace. Sources: mistral-common's tokens/tokenizers/instruct.py; the chat
template of mistralai/Devstral-Small-2507; vLLM's mistral_tool_parser.py.
"""

from __future__ import annotations

import re

from sdk.tools import json_calls
from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.rules import CallRules, Rules
from sdk.tools.stream import Reads, TextStream

_NAME = re.compile(r"[\w.-]")
_ID = re.compile(r"\w")


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    """Reads the older list too; the character after the mark decides."""
    yield from stream.space()
    first = yield from stream.peek()
    if first and first in "[{":
        yield from json_calls.read_calls(stream, builder)
        return
    name = yield from stream.word(_NAME, 64)
    if (yield from stream.accept("[CALL_ID]")):
        yield from stream.word(_ID, 64)
    if (yield from stream.accept("[ARGS]")) is None:
        yield from stream.space()
        if not (yield from stream.at("{")):
            yield from stream.expect("[ARGS]")
    builder.begin(name, known=False)
    stream.kept()
    yield from stream.space()
    yield from json_calls.read_value(stream, builder.arguments)
    builder.end()


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(
        f"{rules.literal(tool.name)} {rules.mark('[ARGS]')} {rules.arguments(tool)}"
        for tool in tools
    )
    more = f" ({rules.mark('[TOOL_CALLS]')} {call})*" if parallel else ""
    return CallRules(call + more, "[TOOL_CALLS]")


FORMAT = ToolFormat(
    name="mistral_args",
    order=40,
    in_template=(("[TOOL_CALLS]", "[ARGS]"),),
    tokens=("[ARGS]",),
    triggers=("[TOOL_CALLS]",),
    turn_ends=("</s>",),
    read=read,
    rules=call_rules,
    call_id_length=9,
)
