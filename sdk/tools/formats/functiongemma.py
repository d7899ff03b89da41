"""FunctionGemma: names without quotes, and strings between ``<escape>``.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>

Sources: the chat template of google/functiongemma-270m-it, and its page "Formatting and best
practices" at ai.google.dev. The template writes the arguments in alphabetical order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.literals import Dialect, read_literal
from sdk.tools.rules import CallRules, Rules, parameters_of, required_of
from sdk.tools.stream import Reads, TextStream
from sdk.tools.values import dump, is_only, parameter_schema, to_schema, types_of

_OPENING = "<start_function_call>"
_CLOSING = "<end_function_call>"
_QUOTE = "<escape>"
_NAME = re.compile(r"[\w.-]")
_WORDS = Dialect((_QUOTE,), False, re.compile(r"[^,:\[\]{}<]"), True)


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    yield from stream.space()
    yield from stream.expect("call:")
    name = yield from stream.word(_NAME, 64)
    yield from stream.expect("{")
    tool = builder.begin(name, known=False)
    stream.keep()
    parameters: Mapping[str, Any] = {} if tool is None else tool.parameters
    builder.arguments("{")
    comma = ""
    while True:
        yield from stream.space()
        if (yield from stream.accept("}")):
            break
        key = str((yield from read_literal(stream, _WORDS)))
        yield from stream.expect(":")
        yield from stream.space()
        value = to_schema(
            (yield from read_literal(stream, _WORDS)), parameter_schema(parameters, key)
        )
        builder.arguments(f"{comma}{dump(key)}: {dump(value)}")
        stream.keep()
        comma = ", "
        if (yield from stream.accept(",")) is None:
            yield from stream.expect("}")
            break
    builder.arguments("}")
    builder.end()
    stream.keep()
    yield from stream.space()
    yield from stream.accept(_CLOSING)


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    call = rules.any_of(_call(rules, tool) for tool in tools)
    return rules.blocks(_OPENING, call, _CLOSING, parallel)


def _call(rules: Rules, tool: Tool) -> str:
    values = {
        name: _value(rules, parameter_schema(tool.parameters, name))
        for name in sorted(parameters_of(tool))
    }
    items = {name: f"{rules.literal(name + ':')} {value}" for name, value in values.items()}
    body = rules.sequence(items, required_of(tool), '","')
    return rules.add("call", f'{rules.literal(f"call:{tool.name}{{")} {body} "}}"')


def _value(rules: Rules, schema: Mapping[str, Any]) -> str:
    """Strings, numbers, booleans and lists of them; other values are any text without a comma."""
    types = types_of(schema)
    quote = rules.mark(_QUOTE)
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(one, str) for one in choices):
        return f"{quote} {rules.any_of(map(rules.literal, choices))} {quote}"
    if is_only(schema, "string"):
        return f"{quote} {rules.text_until(_QUOTE)}"
    if types is not None and types <= {"integer", "number", "boolean", "null"}:
        return rules.json(schema)
    if is_only(schema, "array") and isinstance(schema.get("items"), Mapping):
        return rules.list_of(_value(rules, schema["items"]), parallel=True)
    plain = rules.add("plain", r"/[^,{}\[\]<]+/")
    return f"({quote} {rules.text_until(_QUOTE)} | {plain})"


FORMAT = ToolFormat(
    name="functiongemma",
    order=20,
    in_template=((_OPENING,),),
    tokens=(_OPENING,),
    triggers=(_OPENING,),
    closing={_OPENING: _CLOSING},
    turn_ends=("<start_function_response>", "<end_of_turn>", "<eos>"),
    read=read,
    rules=call_rules,
)
