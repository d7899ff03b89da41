"""Arguments that a grammar forces are an object and have no endless whitespace."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sdk.tools import format_named, grammar_for, tools_of
from tests.structured.byte_matcher import matcher_of

JSON_FORMATS = ["hermes", "llama_json", "mistral_list", "granite_list", "smollm2", "deepseek_v3"]
EMPTY: list[Any] = [None, {}, [], {"$schema": "https://json-schema.org/draft/2020-12/schema"}]


def longest(matcher: Any, text: str) -> str:
    """The part of a text that the grammar allows, from its beginning on."""
    data = text.encode()
    return data[: matcher.allowed(list(data))].decode()


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize("parameters", EMPTY, ids=["none", "empty", "list", "schema"])
def test_parameters_without_a_type_are_an_object(name: str, parameters: Any) -> None:
    tools = tools_of([{"type": "function", "function": {"name": "now", "parameters": parameters}}])
    grammar = grammar_for(tools, "required", format_named(name), parallel=False)
    schemas = re.findall(r"%json (.*)", grammar)
    assert schemas and all('"type": "object"' in one for one in schemas)


@pytest.mark.parametrize("value", ["1", "[]", '"a"', "null"])
def test_another_value_is_no_argument(value: str) -> None:
    tools = tools_of([{"type": "function", "function": {"name": "now", "parameters": {}}}])
    matcher = matcher_of(grammar=grammar_for(tools, "required", format_named("hermes")))
    head = '<tool_call>{"name": "now", "arguments": '
    assert longest(matcher, head + '{"a": 1}}') == head + '{"a": 1}}'
    assert longest(matcher, head + value) == head


@pytest.mark.parametrize("name", ["hermes", "llama_json"])
def test_whitespace_inside_arguments_ends(name: str) -> None:
    """In the grammar itself, which may be used without a model, too."""
    tools = tools_of([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    grammar = grammar_for(tools, "required", format_named(name))
    key = "arguments" if name == "hermes" else "parameters"
    head = ("<tool_call>" if name == "hermes" else "") + f'{{"name": "f", "{key}": {{"a":'
    assert longest(matcher_of(grammar=grammar), head + " " * 50) == head + " "
    assert '"whitespace_flexible": false' in grammar
