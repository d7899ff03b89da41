"""Which schemas are accepted, and that nothing invalid is allowed by those that are."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sdk.errors import RequestError
from sdk.structured.compiler import Grammar, GrammarCompiler
from sdk.structured.params import StructuredOutputsParams
from tests.structured_answers import PERSON

SUITE = Path(__file__).parent / "suite" / "draft2020-12.json"  # MIT: see LICENSE next to it
WHITESPACE = r"[ \n\r\t]+"


def compiled(compiler: GrammarCompiler, schema: Any) -> Grammar:
    return compiler.compile(StructuredOutputsParams(json=schema, whitespace_pattern=WHITESPACE))


def allows(compiler: GrammarCompiler, grammar: Grammar, value: Any) -> bool:
    """Whether a value is allowed, in any order of its properties."""
    if isinstance(value, dict) and 1 < len(value) < 5:
        orders = [dict(items) for items in itertools.permutations(value.items())]
        return any(_allows_text(compiler, grammar, order) for order in orders)
    return _allows_text(compiler, grammar, value)


def _allows_text(compiler: GrammarCompiler, grammar: Grammar, value: Any) -> bool:
    tokens = compiler._tokenizer.encode(
        json.dumps(value, ensure_ascii=False), add_special_tokens=False, parse_special=False
    )
    matcher = grammar.matcher.copy()
    if matcher.allowed(tokens) < len(tokens):
        return False
    matcher.consume(tokens)
    return matcher.accepting


def test_the_json_schema_test_suite(compiler: GrammarCompiler) -> None:
    counts: Counter[str] = Counter()
    wrong, missed = [], []
    for file, groups in json.loads(SUITE.read_text()).items():
        for group in groups:
            schema = group["schema"]
            if not isinstance(schema, dict):
                continue
            try:
                grammar = compiled(compiler, schema)
            except RequestError:
                counts["rejected"] += 1
                continue
            counts["accepted"] += 1
            for description, value, valid in group["tests"]:
                allowed = allows(compiler, grammar, value)
                name = f"{file}: {group['description']}: {description}"
                if allowed and not valid:
                    wrong.append(name)
                elif valid and not allowed and "format" not in file:
                    missed.append(name)
    assert wrong == []
    assert counts["accepted"] >= 200, counts
    # Another order of properties, and whole numbers written as 1.0 where the schema has 1.
    assert len(missed) <= 12, missed


REWRITTEN: list[tuple[dict[str, Any], list[Any]]] = [
    (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"c": 1}],
    ),
    (
        {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
        [{"a": 1, "b": 2}, {"a": 1, "b": None}, {"b": 2}, {}],
    ),
    ({"propertyNames": {"pattern": "^x"}, "type": "object"}, [{}, {"x": 1}, {"xy": 2}, {"a": 1}]),
    ({"propertyNames": {"enum": ["a", "b"]}, "type": "object"}, [{}, {"a": 1, "b": 2}, {"c": 1}]),
    ({"propertyNames": {"maxLength": 2}, "type": "object"}, [{}, {"ab": 1}, {"abc": 1}, {"é": 1}]),
    ({"not": {"type": "string"}}, ["a", 1, 1.5, None, [], {}, True]),
    ({"not": {"required": ["a"]}}, [{"a": 1}, {"b": 1}, {}, 3]),
    ({"not": {"required": ["a", "b"]}, "type": "object"}, [{"a": 1}, {"a": 1, "b": 2}, {}]),
    ({"not": {"not": {"type": "integer"}}}, [1, "a", 1.5]),
    ({"not": {"anyOf": [{"type": "null"}, {"type": "array"}]}}, [None, [], 1, "a"]),
    (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2023-02-29", "1900-02-29", "2000-02-29", "0000-01-01", "2024-04-31", "a"],
    ),
    ({"type": "integer", "format": "int32"}, [2**31 - 1, 3, -4]),
    ({"type": "string", "format": "my own"}, ["anything"]),
    ({"type": "string", "minLength": 2.0}, ["a", "ab"]),
    ({"type": "number", "multipleOf": 0.01}, [0.01, 0.015, 7, 7.25]),
]


@pytest.mark.parametrize(("schema", "values"), REWRITTEN, ids=lambda x: json.dumps(x)[:60])
def test_what_is_rewritten_accepts_the_same_values(
    compiler: GrammarCompiler, schema: dict[str, Any], values: list[Any]
) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    grammar = compiled(compiler, schema)
    found = {json.dumps(value): allows(compiler, grammar, value) for value in values}
    assert found == {json.dumps(value): validator.is_valid(value) for value in values}


def test_times_are_exact(compiler: GrammarCompiler) -> None:
    """jsonschema checks these formats only with another package."""
    moments = compiled(compiler, {"type": ["string", "integer"], "format": "date-time"})
    times = compiled(compiler, {"type": "string", "format": "time"})
    for value, valid in {
        "2024-02-29T23:59:59Z": True,
        "2024-02-29T23:59:59.123456-08:00": True,
        "2024-02-30T00:00:00Z": False,
        "2024-02-29T24:00:00Z": False,
        "2024-02-29 23:59:59Z": False,
        3: True,
    }.items():
        assert allows(compiler, moments, value) == valid, value
    for text, valid in {
        "12:00:00Z": True,
        "12:00:00+01:30": True,
        "12:00:60Z": False,
        "12:00": False,
    }.items():
        assert allows(compiler, times, text) == valid, text


REJECTED: list[tuple[Any, str]] = [
    ({"uniqueItems": True, "type": "array"}, "uniqueItems"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    ({"contains": {"const": 1}}, "contains"),
    ({"not": {"const": 1}}, "not"),
    ({"$ref": "https://example.com/schema.json"}, r"\$ref 'https://example.com/schema.json'"),
    ({"$ref": "other.json#/a"}, "inside the schema"),
    ({"minProperties": 3}, "minProperties 3"),
    ({"multipleOf": 99991}, "multipleOf 99991"),
    ({"format": "uri-template"}, "format 'uri-template'"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"minimum": 3, "maximum": 2, "type": "integer"}, "Unsatisfiable"),
    ({"enum": []}, "Unsatisfiable"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "cannot be enforced"),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "cannot be enforced"),
    ({"type": "wrong"}, "cannot be enforced"),
    ("{", "not valid JSON"),
    ("[1]", "a JSON object"),
]


@pytest.mark.parametrize(("schema", "message"), REJECTED, ids=lambda x: str(x)[:60])
def test_what_cannot_be_enforced_is_named(
    compiler: GrammarCompiler, schema: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        compiled(compiler, schema)


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _doubling(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(1, count):
        both = [{"$ref": f"#/$defs/d{i - 1}"}] * 2
        definitions[f"d{i}"] = {"type": "array", "prefixItems": both, "minItems": 2}
    return {"$ref": f"#/$defs/d{count - 1}", "$defs": definitions}


BOMBS: dict[str, dict[str, Any]] = {
    "a long array": {"json": {"type": "array", "minItems": 10**6, "items": {"type": "string"}}},
    "a long string": {"json": {"type": "string", "minLength": 10**6}},
    "deep": {"json": _nested(300)},
    "doubling": {"json": _doubling(30)},
    "a product of choices": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"const": j}}} for j in range(6)]}
                for i in range(8)
            ]
        }
    },
    "repeats in repeats": {"regex": r"((a|b)*c){500,1000}"},
    "a wide automaton": {"regex": r"(.*a.{30}){20}"},
    "optional letters": {"regex": r"(a?){5000}a{5000}"},
    "endless": {"grammar": 'start: "a" start "b" | "a" start'},
    "a multiple": {"json": {"type": "integer", "multipleOf": 9999991}},
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_time(compiler: GrammarCompiler, name: str) -> None:
    begin = time.process_time()
    with pytest.raises(RequestError):
        compiler.compile(StructuredOutputsParams(**BOMBS[name]))
    assert time.process_time() - begin < 4  # 1 s on a quiet machine


def test_a_long_search_continues_at_low_priority(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the same answer, on a thread that gives way to those that run steps."""
    seen: list[int] = []
    setpriority = os.setpriority
    monkeypatch.setattr(os, "setpriority", lambda *args: (seen.append(args[2]), setpriority(*args)))
    params = StructuredOutputsParams(json=PERSON)
    quick = compiler.compile(params)
    monkeypatch.setattr("sdk.structured.compiler._QUICK_S", -1.0)
    fresh = GrammarCompiler(compiler._tokenizer, compiler._vocab_size, compiler._eos_token_ids)
    assert fresh.compile(params).way == quick.way
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert seen == ([own + 3] if sys.platform == "linux" else [])


def test_without_llguidance_the_extra_is_named(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.structured import library

    library.library.cache_clear()
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    fresh = GrammarCompiler(compiler._tokenizer, compiler._vocab_size, compiler._eos_token_ids)
    try:
        with pytest.raises(RequestError, match=r"pip install 'embedlm\[structured\]'"):
            fresh.compile(StructuredOutputsParams(json=int))
    finally:
        library.library.cache_clear()


def test_the_same_structure_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(StructuredOutputsParams(json={"type": "object"}))
    assert compiler.compile(StructuredOutputsParams(json_object=True)) is first


def test_old_structures_are_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.structured import compiler as module

    monkeypatch.setattr(module, "_CACHE_BYTES", 10 * module._MATCHER_BYTES)
    for number in range(30):
        compiler.compile(StructuredOutputsParams(choice=[f"a{number}"]))
    assert len(compiler._cache) <= 10
    assert compiler._cached_bytes <= 10 * module._MATCHER_BYTES
