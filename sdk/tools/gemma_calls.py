"""Calls as FunctionGemma and Gemma 4 write them: ``call:f{city:<escape>Paris<escape>,days:2}``.

Names and keys have no quotes, and strings have marks of their own instead. The chat templates write
arguments in alphabetical order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.literals import Dialect, read_literal
from sdk.tools.rules import CallRules, Rules, required_of
from sdk.tools.stream import Reads, TextStream
from sdk.tools.values import dump, inner_schema, is_only, parameter_schema, to_schema, types_of

_NAME = re.compile(r"[\w.-]")
_WORD = re.compile(r"[^,:\[\]{}<]")
#: Deeper values are not checked.
_MAX_DEPTH = 8
_COMMA = '","'
#: Types whose values are written as in JSON.
_PLAIN = {"integer", "number", "boolean", "null"}


class GemmaCalls(NamedTuple):
    """The marks of a family: around a call, and around a string."""

    opening: str
    closing: str
    quote: str

    def read(self, stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
        """One call."""
        dialect = Dialect((self.quote,), escapes=False, word=_WORD, bare=True)
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
            key = str((yield from read_literal(stream, dialect)))
            yield from stream.expect(":")
            yield from stream.space()
            value = yield from read_literal(stream, dialect)
            value = to_schema(value, parameter_schema(parameters, key))
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
        yield from stream.accept(self.closing)

    def rules(self, rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
        """One call, or several."""
        call = rules.any_of(self._call(rules, tool) for tool in tools)
        return rules.blocks(self.opening, call, self.closing, parallel)

    def _call(self, rules: Rules, tool: Tool) -> str:
        arguments = self._object(rules, tool.parameters, required_of(tool), 0)
        return rules.add("call", f"{rules.literal(f'call:{tool.name}')} {arguments}")

    def _object(
        self, rules: Rules, schema: Mapping[str, Any], required: list[str], depth: int
    ) -> str:
        items = {}
        for name in sorted(schema.get("properties", ())):
            value = self._value(rules, parameter_schema(schema, name), depth)
            items[name] = f"{rules.literal(f'{name}:')} {value}"
        return f'"{{" {rules.sequence(items, required, _COMMA)} "}}"'

    def _value(self, rules: Rules, schema: Mapping[str, Any], depth: int) -> str:
        """Strings, numbers, booleans, and lists and objects of them; otherwise any value."""
        types = types_of(schema)
        quote = rules.mark(self.quote)
        choices = schema.get("enum")
        if isinstance(choices, list) and all(isinstance(one, str) for one in choices):
            return f"{quote} {rules.any_of(map(rules.literal, choices))} {quote}"
        if is_only(schema, "string"):
            return f"{quote} {rules.text_until(self.quote)}"
        if types is not None and types <= _PLAIN:
            return rules.json(schema)
        if depth < _MAX_DEPTH and is_only(schema, "array") and schema.get("items"):
            item = self._value(rules, inner_schema(schema, schema["items"]), depth + 1)
            return f'("[" "]" | {rules.list_of(item, parallel=True)})'
        if depth < _MAX_DEPTH and is_only(schema, "object") and schema.get("properties"):
            return self._object(rules, schema, list(schema.get("required", ())), depth + 1)
        return self._any(rules)

    def _any(self, rules: Rules) -> str:
        """Any value."""
        quote = rules.mark(self.quote)
        return rules.add_recursive(
            "any",
            f"{quote} {rules.text_until(self.quote)} | WORD | "
            '"[" ({0} ("," {0})*)? "]" | '
            '"{{" (WORD ":" {0} ("," WORD ":" {0})*)? "}}"',
        )
