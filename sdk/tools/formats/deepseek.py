"""DeepSeek-V3.1: the name and the arguments between tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

without the line break.

Sources: the chat template of deepseek-ai/DeepSeek-V3.1; vLLM's deepseekv31_tool_parser.py.
"""

from __future__ import annotations

import re

from sdk.tools import json_calls
from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.rules import CallRules, Rules
from sdk.tools.stream import Reads, TextStream

CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[\w.-]")


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    """Reads V3's calls too: after the separator they have a name, not a brace."""
    if mark == CALLS:
        yield from stream.space()
        yield from stream.expect(CALL)
    while True:
        yield from _read_call(stream, builder)
        yield from stream.space()
        if (yield from stream.accept(CALL)) is None:
            break
    yield from stream.accept(CALLS_END)


def _read_call(stream: TextStream, builder: MessageBuilder) -> Reads[None]:
    name = yield from stream.word(_NAME, 64)
    yield from stream.expect(SEPARATOR)
    yield from stream.space()
    fenced = not (yield from stream.at("{"))
    if fenced:
        name = yield from stream.word(_NAME, 64)
        yield from stream.space()
        yield from stream.expect("```json")
        yield from stream.space()
    builder.begin(name, known=False)
    stream.kept()
    yield from json_calls.read_value(stream, builder.arguments)
    builder.end()
    stream.keep()
    yield from stream.space()
    if fenced:
        yield from stream.accept("```")
    yield from stream.accept(CALL_END)


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    return several(rules, [_call(rules, tool) for tool in tools], parallel)


def several(rules: Rules, calls: list[str], parallel: bool) -> CallRules:
    """The marks around calls."""
    call = f"{rules.mark(CALL)} {rules.any_of(calls)} {rules.mark(CALL_END)}"
    more = f' ("\\n"? {call})*' if parallel else ""
    return CallRules(f"{call}{more} {rules.mark(CALLS_END)}", CALLS)


def _call(rules: Rules, tool: Tool) -> str:
    return f"{rules.literal(tool.name)} {rules.mark(SEPARATOR)} {rules.arguments(tool)}"


FORMAT = ToolFormat(
    name="deepseek_v31",
    order=35,
    in_template=((CALLS,),),
    tokens=(CALLS,),
    triggers=(CALLS, CALL),
    closing={CALLS: CALLS_END, CALL: CALL_END},
    turn_ends=("<｜end▁of▁sentence｜>",),
    read=read,
    rules=call_rules,
    text_arguments=True,
)
