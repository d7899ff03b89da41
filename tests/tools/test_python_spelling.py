"""Values that a model spells in Python, in every format that allows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sdk.structured.library import Matcher
from sdk.tools import MessageParser, Tool, format_named, grammar_for
from tests.structured.byte_matcher import accepts, vocabulary

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}},
        "pair": {"type": "array", "items": {"type": "integer"}},
        "options": {"type": "object", "properties": {"deep": {"type": "array"}}},
        "on": {"type": "boolean"},
        "off": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "name": {"type": "string"},
    },
}
TOOL = Tool("f", "", PARAMETERS)
VALUES = {
    "tags": """['a, b', "it's", 'q"q']""",
    "pair": "(1, '2')",
    "options": """{'deep': (True, None, {1, 2}), "x": 'y' "z"}""",
    "on": "True",
    "off": "None",
}
FOUND = {
    "tags": ["a, b", "it's", 'q"q'],
    "pair": [1, 2],
    "options": {"deep": [True, None, [1, 2]], "x": "yz"},
    "on": True,
    "off": None,
    "name": "n",
}
ARGUMENTS = ", ".join(f"{name}={value}" for name, value in VALUES.items()) + ", name='n'"
CALL = f"f({ARGUMENTS})"
TAGS = "".join(
    f"<parameter={name}>\n{value}\n</parameter>\n"
    for name, value in {**VALUES, "name": "n"}.items()
)
TEXTS = {
    "pythonic": f"[{CALL}]",
    "olmo3": f"<function_calls>\n{CALL}\n</function_calls>",
    "gemma_text": f"```tool_code\nprint({CALL})\n```",
    "smollm3": f"<code>\nx = {CALL}\n</code>",
    "llama_json": f"<|python_tag|>f.call({ARGUMENTS})",
    "qwen3_coder": f"<tool_call>\n<function=f>\n{TAGS}</function>\n</tool_call>",
    "hermes": f"<tool_call>\n<function=f>\n{TAGS}</function>\n</tool_call>",
}


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("name", TEXTS)
def test_python_s_spelling_reaches_the_type_of_the_schema(name: str, size: int) -> None:
    parser = MessageParser(format_named(name), None, (TOOL,))
    text = TEXTS[name]
    for at in range(0, len(text), size):
        parser.push(text[at : at + size])
    parser.finish()
    (call,) = parser.message.tool_calls
    assert call.error is None
    assert json.loads(call.arguments) == FOUND


@pytest.mark.parametrize("quote", ["functiongemma:<escape>", 'gemma_4:<|"|>'])
def test_constants_of_gemma_s_formats(quote: str) -> None:
    name, mark = quote.split(":")
    format = format_named(name)
    values = f"tags:[{mark}a{mark}],pair:[1,{mark}2{mark}],on:True,off:None"
    text = f"{format.triggers[0]}call:f{{{values}}}"
    parser = MessageParser(format, None, (TOOL,))
    parser.push(text + format.closing[format.triggers[0]])
    parser.finish()
    (call,) = parser.message.tool_calls
    assert json.loads(call.arguments) == {"tags": ["a"], "pair": [1, 2], "on": True, "off": None}


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": ["boolean", "null"]}, ["True", "False", "None"], ["true", "null", "1"]),
        (
            {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            ["None", "12"],
            ["null", '"x"', "True"],
        ),
        ({"enum": ["a", True, None]}, ['"a"', "True", "None"], ["False", "true", '"b"']),
        ({"const": False}, ["False"], ["True", "None"]),
    ],
)
def test_constants_in_a_constrained_call(
    schema: dict[str, Any], accepted: list[str], refused: list[str]
) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": schema}, "required": ["a"]})
    grammar = grammar_for((tool,), "required", format_named("pythonic"))
    matcher = Matcher.of(vocabulary(), "lark", grammar)
    assert [one for one in accepted if not accepts(matcher, f"[f(a={one})]")] == []
    assert [one for one in refused if accepts(matcher, f"[f(a={one})]")] == []
