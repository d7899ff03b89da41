"""Free text with structures between tags, in both forms of vLLM and xgrammar."""

from __future__ import annotations

from typing import Any

import pytest

from sdk import LLM, RequestError, SamplingParams
from sdk.serving.openai.requests import structure_of
from sdk.structured.structural_tags import lark_of_tag

from .byte_matcher import accepts, matcher_of

Format = dict[str, Any]
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 99}}
WORD = {"type": "const_string", "value": "yes"}
ANY = {"type": "any_text"}
ADD = {"type": "tag", "begin": "<f=add>", "content": NUMBER, "end": "</f>"}
SUB = {"type": "tag", "begin": "<f=sub>", "content": NUMBER, "end": ["</f>", "!"]}
TAGS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [ADD, SUB]}


@pytest.mark.parametrize(
    ("format", "accepted", "refused"),
    [
        (WORD, ["yes"], ["no", "yes "]),
        (NUMBER, ["7"], ["-7", "x"]),
        ({"type": "regex", "pattern": r"[a-c]+/\d"}, ["ab/1"], ["ab/", "/1"]),
        (ANY, ["", "a\nb"], []),
        ({"type": "any_text", "excludes": ["no", "</"]}, ["yes", "n o"], ["xnox", "</a>"]),
        ({"type": "sequence", "elements": [WORD, NUMBER]}, ["yes7"], ["yes", "7yes"]),
        ({"type": "sequence", "elements": [WORD, ANY]}, ["yes!", "yes"], ["no"]),
        ({"type": "or", "elements": [WORD, NUMBER]}, ["yes", "7"], ["yes7"]),
        ({"type": "optional", "content": WORD}, ["", "yes"], ["yesyes"]),
        ({"type": "star", "content": WORD}, ["", "yesyes"], ["y"]),
        ({"type": "plus", "content": WORD}, ["yes", "yesyes"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": WORD}, ["yes"], ["", "yesyesyes"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": WORD}, ["yesyesyes"], ["yes"]),
        (ADD, ["<f=add>7</f>"], ["<f=add>x</f>", "<f=add>7"]),
        (SUB, ["<f=sub>7!", "<f=sub>7</f>"], ["<f=sub>7"]),
        ({**ADD, "content": ANY}, ["<f=add>a < b</f>"], ["<f=add></f>x", "<f=add>a"]),
        (
            {"type": "sequence", "elements": [{**ADD, "content": ANY}, WORD]},
            ["<f=add>x</f>yes"],
            ["<f=add>x</f>", "<f=add>x</f>no"],
        ),
        (TAGS, ["", "hi", "a <f=add>7</f> b <f=sub>8! c"], ["<f=mul>7</f>", "<f=add>x</f>"]),
        ({**TAGS, "at_least_one": True}, ["<f=add>7</f> b"], ["", "a <f=add>7</f>"]),
        ({**TAGS, "stop_after_first": True}, ["", "a <f=add>7</f>"], ["<f=add>7</f> b"]),
        (
            {**TAGS, "at_least_one": True, "stop_after_first": True},
            ["<f=sub>7!"],
            ["", "a<f=sub>7!", "<f=sub>7! b"],
        ),
        ({**TAGS, "excludes": ["no"]}, ["yes <f=add>7</f>"], ["no", "a no <f=add>7</f>"]),
        (
            {"type": "tag", "begin": "[", "content": TAGS, "end": "]"},
            ["[a]", "[a <f=add>7</f> b]"],
            ["[a", "[<f=add>x</f>]"],
        ),
        (
            {"type": "tags_with_separator", "tags": [ADD, SUB], "separator": ","},
            ["", "<f=add>7</f>", "<f=add>7</f>,<f=sub>8!"],
            ["x", "<f=add>7</f>,"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [ADD],
                "separator": ",",
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<f=add>7</f>"],
            ["", "<f=add>7</f>,<f=add>7</f>"],
        ),
        ({"type": "token", "token": 65}, ["A"], ["B"]),
        ({**ADD, "content": {"type": "json_schema", "json_schema": True}}, ["<f=add>[1]</f>"], []),
    ],
)
def test_formats(format: Format, accepted: list[str], refused: list[str]) -> None:
    matcher = matcher_of(structural_tag={"format": format})
    assert matcher.error is None
    assert [text for text in accepted if not accepts(matcher, text)] == []
    assert [text for text in refused if accepts(matcher, text)] == []


def test_the_older_form() -> None:
    structures = [{"begin": "<f=add>", "schema": NUMBER["json_schema"], "end": "</f>"}]
    matcher = matcher_of(structural_tag={"structures": structures, "triggers": ["<f="]})
    assert accepts(matcher, "so <f=add>7</f>.") and not accepts(matcher, "<f=add>x</f>")


def test_control_tokens_are_tokens() -> None:
    text = lark_of_tag(
        {"format": {"type": "tag", "begin": "<think>\n", "content": ANY, "end": "</think>"}},
        str,
        str,
        {"<think>", "</think>"}.__contains__,
    )
    assert r'start: <think> "\n" FREE_1 </think>' in text
    trigger = {**TAGS, "triggers": ["<call>"], "tags": [{**ADD, "begin": "<call>add"}]}
    assert "<call>" in lark_of_tag({"format": trigger}, str, str, {"<call>"}.__contains__)
    token = {"type": "token", "token": "<call>"}
    named = {**ADD, "begin": token, "end": token}
    assert "<call>" in lark_of_tag({"format": named}, str, str, {"<call>"}.__contains__)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ({}, "expected {'structures'"),
        ({"structures": [], "triggers": ["<"]}, "expected {'structures'"),
        ({"format": {"type": "dispatch"}}, "expected a format of the type const_string"),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "expected a format of the type"),
        ({"format": 3}, "expected a format of the type"),
        ({"format": {"type": "const_string"}}, "value: expected a string, found None"),
        ({"format": {**NUMBER, "style": "qwen_xml"}}, "with the style 'json'"),
        ({"format": {**NUMBER, "any_order": True}}, "in the schema's order"),
        ({"format": {"type": "json_schema"}}, "json_schema: expected a schema"),
        ({"format": {**ANY, "max_tokens": 3}}, "any_text without max_tokens"),
        ({"format": {**ANY, "excludes": [3]}}, "excludes: expected a list of strings"),
        ({"format": {"type": "sequence", "elements": []}}, "elements: expected a list of formats"),
        ({"format": {"type": "sequence", "elements": [ANY, WORD]}}, "expected any_text at the end"),
        ({"format": {"type": "star", "content": ANY}}, "expected any_text at the end"),
        (
            {"format": {"type": "repeat", "min": 2, "max": 1, "content": WORD}},
            "expected min from 0",
        ),
        ({"format": {"type": "repeat", "min": 0, "max": 9999, "content": WORD}}, "max up to 2000"),
        ({"format": {"type": "repeat", "content": WORD}}, "min and max as numbers"),
        ({"format": {**ADD, "end": 3}}, "end: expected a string"),
        ({"format": {**TAGS, "triggers": ["<g"]}}, "expected a trigger that '<f=add>' begins with"),
        ({"format": {**TAGS, "tags": [3]}}, "expected a tag, found 3"),
        ({"format": {"type": "token", "token": "x"}}, "token: expected a control token"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tag: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"structural_tag: .*{message}"):
        matcher_of(structural_tag=tag)


def test_nested_formats_are_limited() -> None:
    format: Format = WORD
    for _ in range(40):
        format = {"type": "optional", "content": format}
    with pytest.raises(RequestError, match="formats are nested more than 32 deep"):
        matcher_of(structural_tag={"format": format})


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "structural_tag", "format": {**TAGS, "at_least_one": True}},
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f=add>", "schema": {"type": "integer"}, "end": "</f>"}],
            "triggers": ["<f="],
        },
    ],
)
def test_a_response_format_is_the_same_as_the_parameter(
    tiny: LLM, response_format: dict[str, Any]
) -> None:
    structure = structure_of(response_format)
    assert structure is not None
    params = SamplingParams(max_tokens=40, temperature=0, structured_outputs=structure)
    [output] = tiny.generate("the cat", params, use_tqdm=False)
    assert output.outputs[0].finish_reason in ("stop", "length")
    with pytest.raises(RequestError, match=r"response_format: expected .* 'structural_tag'"):
        structure_of({"type": "structural"})
