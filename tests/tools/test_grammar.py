"""Grammars for calls, compiled and run by llguidance."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sdk.api.errors import RequestError
from sdk.tools import Tool, ToolChoice, ToolFormat, all_formats, format_named, grammar_for
from sdk.tools.reasoning import reasoning_named
from tests.tools.outputs import OUTPUTS, TOOLS, WEATHER, Output, by_name, parse

REQUIRED, AUTO = ToolChoice("required"), ToolChoice("auto")
CONSTRAINED = [output for output in OUTPUTS if output.constrained]
HERMES = format_named("hermes")

#: Special tokens of the families' tokenizers. <tool_call> is not a special token in Qwen's.
SPECIAL = (
    *("<|endoftext|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"),
    *("<|constrain|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|python_tag|>", "<escape>"),
    *("<start_function_call>", "<end_function_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    *(
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<think>",
        "</think>",
    ),
)


@cache
def tokenizer() -> Tokenizer:
    """Bytes, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return made


@cache
def constraint_tokenizer() -> LLTokenizer:
    return LLTokenizer(tokenizer().to_str(), eos_token=tokenizer().token_to_id("<|endoftext|>"))


def special_tokens() -> dict[str, int]:
    return {token: tokenizer().token_to_id(token) for token in SPECIAL}


def accepted(grammar: str, text: str) -> tuple[bool, str]:
    """Whether the grammar accepts a text, and the part of it that may be written."""
    matcher = LLMatcher(constraint_tokenizer(), LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().encode(text).ids
    count = matcher.try_consume_tokens(ids)
    written = tokenizer().decode(ids[:count], skip_special_tokens=False)
    return count == len(ids) and matcher.is_accepting(), written


def accepts(grammar: str, text: str) -> bool:
    return accepted(grammar, text)[0]


def accepts_text(grammar: str, text: str) -> bool:
    """Of a tokenizer without special tokens."""
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar(
    format: ToolFormat | str,
    choice: ToolChoice = REQUIRED,
    parallel: bool = True,
    tools: tuple[Tool, ...] = TOOLS,
    **options: Any,
) -> str:
    made = format_named(format) if isinstance(format, str) else format
    options = {"special_tokens": special_tokens(), **options}
    return grammar_for(tools, choice, made, parallel, **options)


@pytest.mark.parametrize("output", CONSTRAINED, ids=by_name)
@pytest.mark.parametrize("choice", [REQUIRED, AUTO], ids=["required", "auto"])
def test_documented_calls_are_accepted(output: Output, choice: ToolChoice) -> None:
    assert accepts(grammar(output.format, choice), output.text)
    assert accepts_text(grammar(output.format, choice, special_tokens={}), output.text)


def test_every_format_is_constrained() -> None:
    assert {output.format for output in CONSTRAINED} == {one.name for one in all_formats()}


@pytest.mark.parametrize("output", CONSTRAINED, ids=by_name)
@pytest.mark.parametrize("choice", [REQUIRED, AUTO], ids=["required", "auto"])
def test_wrong_arguments_and_unknown_tools_are_not(output: Output, choice: ToolChoice) -> None:
    made = grammar(output.format, choice)
    for right, wrong in [("get_weather", "get_height"), ("city", "town")]:
        text = output.text.replace(right, wrong)
        assert text != output.text
        accepting, written = accepted(made, text)
        assert not accepting
        assert written == text[: text.index(wrong[4:] if wrong.startswith("get") else wrong)]


@pytest.mark.parametrize("output", CONSTRAINED, ids=by_name)
def test_a_call_is_required(output: Output) -> None:
    made = grammar(output.format)
    assert not accepts(made, "It is sunny.")
    assert accepts(grammar(output.format, AUTO), "It is sunny.") == (output.format != "harmony")
    assert not accepts(made, "")


@pytest.mark.parametrize("output", CONSTRAINED, ids=by_name)
def test_a_named_tool_is_the_only_one(output: Output) -> None:
    made = grammar(output.format, ToolChoice("required", "get_time"))
    assert not accepts(made, output.text)


def test_the_number_of_calls_is_limited() -> None:
    several = [output for output in CONSTRAINED if len(output.calls) > 1]
    assert {output.format for output in several} >= {"hermes", "llama_json", "pythonic", "smollm2"}
    for output in several:
        assert accepts(grammar(output.format), output.text)
        assert not accepts(grammar(output.format, parallel=False), output.text), output.name


@pytest.mark.parametrize("format", ["hermes", "mistral_args", "granite_list", "deepseek_v31"])
def test_text_may_come_before_a_call_if_the_choice_is_auto(format: str) -> None:
    output = next(one for one in CONSTRAINED if one.format == format)
    made = grammar(format, AUTO)
    assert accepts(made, f"I look.\n{output.text}")
    assert accepts(made, "A < b, [x] and <tool are text.")
    assert not accepts(made, f"I look.\n{output.text} And more.")
    assert not accepts(grammar(format), f"I look.\n{output.text}")


def test_reasoning_may_come_first() -> None:
    think = reasoning_named("think")
    call = next(one for one in CONSTRAINED if one.name == "hermes").text
    for check, tokens in ((accepts, special_tokens()), (accepts_text, {})):
        made = grammar("hermes", reasoning=think, special_tokens=tokens)
        assert check(made, f"<think>\nA <tool_call>?\n</think>\n\n{call}")
        assert check(made, call)
        assert not check(made, f"Hm.</think>{call}")
        made = grammar(
            "hermes", reasoning=think, prompt_opens_reasoning=True, special_tokens=tokens
        )
        assert check(made, f"Hm.</think>{call}")
        assert not check(made, call)


def test_a_harmony_call_may_follow_analysis_and_a_preamble() -> None:
    harmony = reasoning_named("harmony")
    texts = {output.name: output.text for output in OUTPUTS}
    for choice in (REQUIRED, AUTO):
        made = grammar("harmony", choice, reasoning=harmony)
        for name in ("harmony", "harmony-call", "harmony-preamble", "harmony-stopped"):
            assert accepts(made, texts[name]), name
        final = texts["harmony-final"].removesuffix("<|return|>")
        assert accepts(made, final) == (choice is AUTO)


NESTED = Tool(
    "plan",
    "",
    {
        "type": "object",
        "properties": {
            "color": {"enum": ["red", "blue"]},
            "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}},
            "ratio": {"type": ["number", "null"]},
            "fast": {"type": "boolean"},
        },
        "required": ["color", "stops"],
        "$defs": {
            "Stop": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
)


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        (
            "pythonic",
            '[plan(color="red", stops=[{"name": "a"}], ratio=1.5, fast=True)]',
            ["[plan(color=|3", "stops=|3", "ratio=|[", "fast=|1"],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=plan>\n<parameter=color>\nred\n</parameter>\n"
            '<parameter=stops>\n[{"name": "a"}]\n</parameter>\n'
            "<parameter=fast>\ntrue\n</parameter>\n</function>\n</tool_call>",
            ["color>\n|green", "stops>\n|3", "fast>\n|1"],
        ),
        (
            "hermes",
            '<tool_call>\n{"name": "plan", "arguments": {"color": "red", "stops": '
            '[{"name": "a"}], "ratio": null, "fast": true}}\n</tool_call>',
            ['"color": |"green"', '"stops": |3', '"ratio": |"x"', '"fast": |1'],
        ),
    ],
)
def test_arguments_follow_the_schema(format: str, right: str, wrong: list[str]) -> None:
    made = grammar(format, tools=(NESTED,))
    assert accepts(made, right)
    (call,) = parse([right], format, tools=(NESTED,)).message.tool_calls
    assert call.error is None and json.loads(call.arguments)["stops"] == [{"name": "a"}]
    for part in wrong:
        name, _, value = part.partition("|")
        beginning = right[: right.index(name)] + name
        _, written = accepted(made, beginning + value)
        assert written in (beginning, beginning + '"'), part


def test_optional_parameters_may_be_left_out_in_any_combination() -> None:
    names = ["a", "b", "c", "d"]
    for required in ([], ["a"], ["c"], ["b", "d"], names):
        properties = {name: {"type": "integer"} for name in names}
        tool = Tool("f", "", {"type": "object", "properties": properties, "required": required})
        made = grammar("pythonic", tools=(tool,))
        for chosen in range(16):
            given = [name for bit, name in enumerate(names) if chosen >> bit & 1]
            text = "[f(" + ", ".join(f"{name}=1" for name in given) + ")]"
            assert accepts(made, text) == (set(required) <= set(given)), (required, text)


def test_a_tool_without_parameters_is_called_without_arguments() -> None:
    tool = Tool("now", "", {"type": "object", "properties": {}})
    assert accepts(grammar("pythonic", tools=(tool,)), "[now()]")
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "null"}}})
    assert accepts(grammar("pythonic", tools=(tool,)), "[f(a=None)]")
    tool = Tool("now", "", {"type": "object", "properties": {}})
    assert accepts(
        grammar("functiongemma", tools=(tool,)),
        "<start_function_call>call:now{}<end_function_call>",
    )


PLAN = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["fast", "slow", "a b"]},
        "count": {"type": "integer"},
        "on": {"type": "boolean"},
        "lengths": {"type": "array", "items": {"type": "integer"}},
        "stop": {"$ref": "#/$defs/Stop"},
        "maybe": {"type": ["boolean", "null"]},
    },
    "required": ["mode", "lengths"],
    "additionalProperties": False,
    "$defs": {
        "Stop": {
            "type": "object",
            "properties": {"zip": {"type": "integer"}, "ok": {"type": "boolean"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}


def random_text(grammar: str, chance: random.Random) -> str | None:
    """A text that the grammar accepts; None if it would get too long."""
    matcher = LLMatcher(constraint_tokenizer(), LLMatcher.grammar_from_lark(grammar))
    end = tokenizer().token_to_id("<|endoftext|>")
    ids: list[int] = []
    while len(ids) < 1000:
        mask = np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)
        allowed = [int(one) for one in np.nonzero(mask)[0] if one != end]
        if matcher.is_accepting() and (not allowed or chance.random() < 0.5):
            return tokenizer().decode(ids, skip_special_tokens=False)
        texts = [tokenizer().decode([one]) for one in allowed]
        # Runs of digits and whitespace have no end.
        weights = [0.2 if text.isspace() or text.isdigit() else 1 for text in texts]
        ids += chance.choices(allowed, weights)
        assert matcher.consume_token(ids[-1])
    return None


@pytest.mark.parametrize("format", all_formats(), ids=lambda one: one.name)
def test_whatever_a_grammar_accepts_is_a_valid_call(format: ToolFormat) -> None:
    tools = (Tool("plan", "", PLAN), Tool("stop-now", "", {"type": "object", "properties": {}}))
    schemas = {tool.name: tool.parameters for tool in tools}
    done = 0
    for seed in range(8):
        made = grammar(format, parallel=seed % 2 == 0, tools=tools)
        text = random_text(made, random.Random(seed))
        if text is None:
            continue
        done += 1
        message = parse([text], format.name, tools=tools).message
        assert message.tool_calls, text
        assert message.content == "" or format.channels, text
        for call in message.tool_calls:
            assert call.error is None, text
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert done >= 4


STOP = {"type": "object", "properties": {"zip": {"type": "integer"}}, "required": ["zip"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("kind", ["<escape>a<escape>"], ["<escape>c<escape>", "a"]),
        ("list", ["[<escape>x<escape>,<escape>y<escape>]", "[]"], ["3", "[3]"]),
        ("size", ["3", "-1"], ["<escape>3<escape>", "x"]),
        ("place", ["{a:1.5,b:true}", "{b:false}"], ["{a:1.5}", "3", "{b:1}"]),
        ("stop", ["{zip:3}"], ["{zip:<escape>a<escape>}", "{}"]),
        ("stops", ["[{zip:3},{zip:4}]"], ["[3]"]),
        ("node", ["{}", "{next:{next:{}}}", "{next:" * 12 + "{}" + "}" * 12], ["{other:3}"]),
        (
            "other",
            ["x", "3", "<escape>a b<escape>", "[1,{k:[]}]", "{k:{l:<escape>m<escape>}}"],
            ["a b"],
        ),
    ],
)
def test_values_of_functiongemma(name: str, right: list[str], wrong: list[str]) -> None:
    place = {"b": {"type": "boolean"}, "a": {"type": "number"}}
    properties = {
        "kind": {"enum": ["a", "b"]},
        "list": {"type": "array", "items": {"type": "string"}},
        "node": {"$ref": "#/$defs/Node"},
        "other": {},
        "place": {"type": "object", "properties": place, "required": ["b"]},
        "size": {"type": "integer"},
        "stop": {"$ref": "#/$defs/Stop"},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}},
    }
    definitions = {"Stop": STOP, "Node": NODE}
    tool = Tool("f", "", {"type": "object", "properties": properties, "$defs": definitions})
    made = grammar("functiongemma", tools=(tool,))
    for value, expected in [*((one, True) for one in right), *((one, False) for one in wrong)]:
        text = f"<start_function_call>call:f{{{name}:{value}}}<end_function_call>"
        assert accepts(made, text) == expected, value
        if expected:
            (call,) = parse([text], "functiongemma", tools=(tool,)).message.tool_calls
            assert call.error is None


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (TOOLS, "none", "'none' and answers without tools allow any text"),
        ((), "auto", "'none' and answers without tools allow any text"),
        ((), REQUIRED, "'required' needs tools"),
        ((WEATHER,), ToolChoice("required", "other"), "expected .*found ToolChoice"),
    ],
)
def test_a_grammar_needs_tools_and_a_constraint(
    tools: tuple[Tool, ...], choice: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        grammar_for(tools, choice, HERMES)
