"""Rules that meet only in the middle of an answer: it still ends, and is valid, or is refused
before."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from sdk import LLM, RequestError, SamplingParams
from sdk.api.structured_params import StructuredOutputsParams
from sdk.kernels.operators.mask_tasks import MaskTasks
from sdk.structured.answer import StructuredAnswer
from sdk.structured.compiler import GrammarCompiler
from sdk.structured.library import mask_functions
from sdk.structured.property_patterns import matches_all, names_among

Schema = dict[str, Any]
INTEGER = {"type": "integer"}
#: Without end: every value contains another one.
ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/x"}}, "required": ["n"]}
TREE = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/x"}, "v": INTEGER},
    "required": ["v"],
}


def answers(
    llm: LLM, schema: Schema, count: int = 4, tokens: tuple[int, ...] = (40, 60, 100, 200)
) -> list[str]:
    """What a random model answers with few and many tokens."""
    params = [
        SamplingParams(
            temperature=5.0,
            seed=seed,
            max_tokens=tokens[seed % len(tokens)],
            structured_outputs={"json": schema},
        )
        for seed in range(count)
    ]
    outputs = llm.generate(["the cat"] * count, params, use_tqdm=False)
    assert {one.outputs[0].finish_reason for one in outputs} == {"stop"}
    return [one.outputs[0].text for one in outputs]


def is_valid(schema: Schema, text: str) -> bool:
    # jsonschema takes an empty pattern of properties for none.
    given = json.loads(json.dumps(schema).replace('"": ', '"(?:)": '))
    return jsonschema.Draft202012Validator(given).is_valid(json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"ab": INTEGER}, "patternProperties": {"^ab$": {}}},
        {"properties": {"ab": INTEGER, "c": {}}, "patternProperties": {"^(ab|c)$": {"minimum": 3}}},
        {"properties": {"ab": INTEGER}, "patternProperties": {"^a[b-d]?$": {"maximum": 3}}},
        {"patternProperties": {"^ab$": {"maximum": 3}}, "required": ["ab"]},
        {"allOf": [{"patternProperties": {"^ab$": {}}}, {"properties": {"ab": INTEGER}}]},
        {"$ref": "#/$defs/x", "properties": {"ab": INTEGER}, "patternProperties": {"^ab$": {}}},
        {"anyOf": [{"patternProperties": {"^ab$": {}}}], "properties": {"ab": INTEGER}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_a_pattern_of_listed_names_only_leaves_no_way_into_a_dead_end(
    tiny: LLM, schema: Schema
) -> None:
    schema = {"type": "object", "additionalProperties": False, **schema, "$defs": {"x": {}}}
    assert all(is_valid(schema, text) for text in answers(tiny, schema))


@pytest.mark.parametrize("pattern", ["", "^", "$", "a?", ".*", "^[a-z]*", "x*|y"])
def test_a_pattern_that_matches_every_name_holds_for_all_properties(
    tiny: LLM, pattern: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"ab": INTEGER},
        "patternProperties": {pattern: {"maximum": 3, "minimum": 1}},
        "required": ["ab", "c"],
        "additionalProperties": {"type": "boolean"},
    }
    texts = answers(tiny, schema)
    values = [json.loads(text) for text in texts]
    assert all(1 <= one["ab"] <= 3 for one in values)
    assert all(is_valid(schema, text) for text in texts)


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"b$": INTEGER}},  # a name ends with b
        {"patternProperties": {"^a{30}$": INTEGER}},
        {"additionalProperties": INTEGER, "patternProperties": {"^.*$": {"type": "null"}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}, "c": INTEGER}},
        {"properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/x"}}}},
        {
            "properties": {
                "a": {
                    "type": "string",
                    "pattern": "^(a{7})*$",
                    "allOf": [{"pattern": "^(a{5})*$"}],
                    "minLength": 1,
                }
            }
        },
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_an_answer_ends_where_its_parts_do_not_tell_how_long_it_gets(
    tiny: LLM, schema: Schema
) -> None:
    schema = {"type": "object", "additionalProperties": False, **schema, "$defs": {"x": ENDLESS}}
    assert all(is_valid(schema, text) for text in answers(tiny, schema, 8))


def test_a_required_part_without_end_is_refused(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="json: it cannot be enforced"):
        answers(tiny, {"$ref": "#/$defs/x", "$defs": {"x": ENDLESS}})


def test_masks_after_drafts_that_were_not_taken(compiler: GrammarCompiler) -> None:
    """The library keeps the mask of a draft and would take it for that of another text."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": TREE}}
    grammar = compiler.compile(StructuredOutputsParams(json={**schema, "required": ["a"]}))
    encode = grammar.tokens.encode
    answer = StructuredAnswer(grammar, (), encode('{"a": {"'), 400)

    def mask(drafts: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
        masks = np.zeros((1 + len(drafts), grammar.tokens.words), np.uint32)
        tasks = MaskTasks(1)
        task = answer.task(0, drafts)
        assert task is not None
        tasks.set(mask_functions(), [task], masks)
        tasks.compute()
        return list(masks)

    mask(encode('n":'))
    for token in encode('v":'):
        answer.accept(token)
    fresh = StructuredAnswer(grammar, (), encode('{"a": {"v":'), 400)
    (found,) = mask(())
    answer = fresh
    (expected,) = mask(())
    assert np.array_equal(found, expected)


def test_a_search_finds_its_way_where_the_library_confuses_masks(tiny: LLM) -> None:
    for schema in (
        {"type": "object", "properties": {"ab": {"$ref": "#/$defs/x"}}, "required": ["ab", "c"]},
        {"type": "object", "required": ["a", "b"], "additionalProperties": {"$ref": "#/$defs/x"}},
        {"$ref": "#/$defs/x"},
    ):
        schema = {**schema, "$defs": {"x": TREE}}
        assert all(is_valid(schema, text) for text in answers(tiny, schema, tokens=(120, 300)))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^ab$", ["ab"]),
        ("^(a|b)c?$", ["a", "ac", "b", "bc"]),
        ("^a$|^b$", ["a", "b"]),
        ("^[ab]$", ["a", "b"]),
        ("^a{1,2}$", None),  # "aa" is not listed
        ("^a", None),
        ("a$", None),
        ("ab", None),
        ("^a*$", None),
        (r"^\w$", None),
        (r"^\d$", None),
        ("^a$b", None),
        ("^(?!a)$", None),
        ("^[^a]$", None),
        ("(", None),
    ],
)
def test_names_of_a_pattern(pattern: str, names: list[str] | None) -> None:
    assert names_among(pattern, frozenset(["a", "b", "ab", "ac", "bc"])) == names


def test_patterns_that_match_everything() -> None:
    assert all(map(matches_all, ["", "^", "$", "a?", "^.*", "[a-z]*"]))
    assert not any(map(matches_all, ["^$", "^.*$", ".", "a", "^a", "(", r"\b"]))


LEAVES: list[Any] = [
    *({"type": "integer"}, {"maximum": 5}, {"type": "integer", "multipleOf": 3}, {"minimum": 3}),
    *({"type": "string"}, {"maxLength": 4}, {"type": "string", "pattern": "^[a-f]+$"}),
    *({"pattern": "x"}, {"enum": ["x", "abc", 1, None]}, {"const": "abc"}, {"format": "date"}),
    *({"type": "array", "maxItems": 2}, {"items": {"maximum": 4}}, {"minProperties": 1}),
    *({"additionalProperties": False}, {"required": ["q"]}, True, {}, {"not": {"const": 1}}, False),
    *({"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}, {"$ref": "#/$defs/z", "maxLength": 4}),
]
PATTERNS = [
    "^a",
    "^ab$",
    "b$",
    "^[a-z]+$",
    "",
    "x",
    "^ab|^c$",
    ".",
    "^.*$",
    "^(ab|c)$",
    "\\d",
    "^$",
]
NAMES = ["ab", "c", "x_1", "a", "b1"]


def random_object(chosen: random.Random, depth: int = 0) -> Schema:
    schema: Schema = {"type": "object"}
    names = chosen.sample(NAMES, chosen.randint(0, 3))
    schema["properties"] = {name: random_leaf(chosen, depth + 1) for name in names}
    patterns = chosen.sample(PATTERNS, chosen.choice([0, 1, 1, 1, 2]))
    schema["patternProperties"] = {one: random_leaf(chosen, depth + 1) for one in patterns}
    if chosen.random() < 0.5:
        rest = chosen.choice([False, False, random_leaf(chosen, depth + 1)])
        schema["additionalProperties"] = rest
    if chosen.random() < 0.5:
        schema["required"] = chosen.sample(NAMES, chosen.randint(1, 2))
    items = list(schema.items())
    chosen.shuffle(items)
    return dict(items)


def random_leaf(chosen: random.Random, depth: int) -> Any:
    kind = chosen.random() if depth < 2 else 1.0
    if kind < 0.2:
        key = chosen.choice(["allOf", "anyOf", "oneOf"])
        return {key: [random_leaf(chosen, depth + 1), random_leaf(chosen, depth + 1)]}
    return random_object(chosen, depth) if kind < 0.35 else chosen.choice(LEAVES)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", range(30))
def test_a_random_schema_is_refused_or_all_its_answers_end(tiny: LLM, seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(20):
        schema = random_object(chosen)
        kind = chosen.random()
        if kind < 0.5:
            schema[chosen.choice(["allOf", "anyOf"])] = [random_object(chosen) for _ in "ab"]
        elif kind < 0.6:
            schema["$ref"] = "#/$defs/w"
        schema["$defs"] = {
            "x": TREE,
            "y": {**ENDLESS, "properties": {"n": {"$ref": "#/$defs/y"}}},
            "z": {"type": "string", "pattern": "^[a-e]*$"},
            "w": random_object(chosen),
        }
        try:
            found = answers(tiny, schema)
        except RequestError:
            continue
        assert [text for text in found if not is_valid(schema, text)] == [], schema
