"""Rules of a Lark grammar for llguidance, as the formats need them.

llguidance's dialect is described in its docs/syntax.md: ``%json {...}`` is a rule for the values of
a JSON Schema, ``<name>`` and ``<[id]>`` are special tokens, and a rule with ``[lazy]`` ends as soon
as its regular expression matches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sdk.structured.rewriting import WHITESPACE, rewritten
from sdk.tools.definitions import Tool
from sdk.tools.values import parameter_schema, types_of

#: Optional whitespace: as much as pretty-printed calls have, but no endless run.
SPACE = "SPACE?"
#: Any text; special tokens are not text.
TEXT = "TEXT"
_HEADER = (
    "TEXT: /(?s:.*)/",
    r"SPACE: /[ \t\r\n]{1,8}/",
    r"WORD: /[^,:{}\[\]<>\s]+/",
)
_TOKEN = re.compile(r"<[^<>\[\]\s][^<>\s]*>")


#: Constants as Python spells them.
_CONSTANTS = ((True, '"True"'), (False, '"False"'), (None, '"None"'))


def _allows(schema: Mapping[str, Any], types: frozenset[str], value: bool | None) -> bool:
    """Whether a schema of some types allows a constant."""
    if ("null" if value is None else "boolean") not in types:
        return False
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [value])
    return any(one is value for one in listed)


class CallRules(NamedTuple):
    """The calls of one format.

    ``calls``: one or several calls, after ``trigger``. ``trigger`` is empty for calls that begin
    without a mark; then ``first`` has the characters that they begin with.
    ``otherwise``: answers without a call, if they are not simply text.
    """

    calls: str
    trigger: str = ""
    first: str = ""
    otherwise: str | None = None


class Rules:
    """The rules of a grammar. Methods return expressions for the right-hand side of a rule.

    ``special_tokens``: ids of the special tokens of the tokenizer. Marks that are among them are
    tokens; others are text.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._tokens = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._lines = list(_HEADER)
        self._count = 0

    def add(self, name: str, body: str) -> str:
        """A new rule. ``name`` may end with options in brackets."""
        self._count += 1
        name, _, options = name.partition("[")
        unique = f"{name}_{self._count}"
        self._lines.append(f"{unique}[{options}: {body}" if options else f"{unique}: {body}")
        return unique

    def add_recursive(self, name: str, body: str) -> str:
        """A new rule that contains itself, at every ``{0}`` of its body."""
        unique = f"{name}_{self._count + 1}"
        self.add(name, body.format(unique))
        return unique

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._lines, ""])

    def literal(self, text: str) -> str:
        """Exactly this text."""
        return json.dumps(text, ensure_ascii=False)

    def mark(self, mark: str) -> str:
        """A mark, which may contain special tokens."""
        parts = []
        at = 0
        for found in self._split.finditer(mark):
            if found.start() > at:
                parts.append(self.literal(mark[at : found.start()]))
            token = found[0]
            parts.append(token if _TOKEN.fullmatch(token) else f"<[{self._tokens[token]}]>")
            at = found.end()
        if at < len(mark):
            parts.append(self.literal(mark[at:]))
        return " ".join(parts)

    def text_until(self, mark: str) -> str:
        """Any text and then a mark."""
        if self._split.match(mark):
            return f"{TEXT} {self.mark(mark)}"
        return self.add("until[lazy]", f"/(?s:.*){escape(mark)}/")

    def json(self, schema: Mapping[str, Any]) -> str:
        """A value that fits a JSON Schema, with at most one space after a comma and a colon."""
        written = {**rewritten(schema), "x-guidance": WHITESPACE}
        return self.add("value", f"%json {json.dumps(written, ensure_ascii=False)}")

    def arguments(self, tool: Tool) -> str:
        """All arguments of a call: an object, also where the schema does not say so."""
        return self.json({**tool.parameters, "type": "object"})

    def any_of(self, expressions: Iterable[str]) -> str:
        """One of several expressions."""
        return f"({' | '.join(expressions)})"

    def blocks(self, opening: str, call: str, closing: str, parallel: bool) -> CallRules:
        """``opening call closing``, or several of them."""
        body = f"{SPACE} {call} {SPACE} {self.mark(closing)}"
        more = f" ({SPACE} {self.mark(opening)} {body})*" if parallel else ""
        return CallRules(body + more, opening)

    def list_of(self, item: str, parallel: bool, separator: str = '","') -> str:
        """``[item]``, or several with commas."""
        more = f" ({SPACE} {separator} {SPACE} {item})*" if parallel else ""
        return f'"[" {SPACE} {item}{more} {SPACE} "]"'

    def json_call(self, tool: Tool, key: str = "arguments", id_length: int | None = None) -> str:
        """``{"name": "f", "arguments": {...}}``; with ``id_length`` it may have an id too."""
        words = ["{", '"name"', ":", json.dumps(tool.name), ",", json.dumps(key), ":"]
        beginning = f" {SPACE} ".join(map(self.literal, words))
        end = f'{SPACE} "}}"'
        if id_length is not None:
            call_id = rf'/"[a-zA-Z0-9]{{{id_length}}}"/'
            end = f'({SPACE} "," {SPACE} "\\"id\\"" {SPACE} ":" {SPACE} {call_id})? {end}'
        return self.add("call", f"{beginning} {SPACE} {self.arguments(tool)} {end}")

    def python_call(self, tool: Tool) -> str:
        """``f(a=1, b="x")``, with the parameters in the order of the schema."""
        names = parameters_of(tool)
        items = {
            name: f"{self.literal(name + '=')} {self._python_value(tool, name)}" for name in names
        }
        body = self.sequence(items, required_of(tool), '", "')
        return self.add("call", f'{self.literal(tool.name + "(")} {body} ")"')

    def _python_value(self, tool: Tool, name: str) -> str:
        schema = parameter_schema(tool.parameters, name)
        types = types_of(schema) or frozenset()
        if not types & {"boolean", "null"}:
            return self.json(schema)
        found = [spelling for value, spelling in _CONSTANTS if _allows(schema, types, value)]
        if rest := types - {"boolean", "null"}:
            shared: dict[str, Any] = {
                key: schema[key] for key in ("$defs", "definitions") if key in schema
            }
            own = {key: value for key, value in schema.items() if key not in shared}
            found.append(self.json({"type": sorted(rest), "allOf": [own], **shared}))
        return self.any_of(found)

    def sequence(self, items: Mapping[str, str], required: Sequence[str], comma: str) -> str:
        """Items in order with commas between them; those that are not required may be left out."""
        # Two rules per item, from the last one on: with and without an item before it.
        first, later = "", ""
        for index, (name, item) in enumerate(reversed(list(items.items()))):
            if index == 0:
                first = item if name in required else f"({item})?"
                later = f"{comma} {item}" if name in required else f"({comma} {item})?"
                continue
            rest = self.add("rest", later)
            if name in required:
                first = f"{item} {rest}"
                later = f"{comma} {item} {rest}"
            else:
                without = self.add("without", first)
                first = f"{item} {rest} | {without}"
                later = f"({comma} {item})? {rest}"
        return self.add("parameters", first or '""')


def escape(text: str) -> str:
    """Text in a regular expression between slashes."""
    escaped = re.sub(r"[\\.+*?()|\[\]{}^$/]", r"\\\g<0>", text)
    return escaped.replace("\n", r"\n")


def parameters_of(tool: Tool) -> list[str]:
    """The names of the parameters of a tool."""
    return list(tool.parameters.get("properties", ()))


def required_of(tool: Tool) -> list[str]:
    """The names of the parameters that every call has."""
    return list(tool.parameters.get("required", ()))
