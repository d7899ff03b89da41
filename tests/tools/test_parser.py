"""Broken calls, text that looks like a call, whitespace, reasoning, and the cost of it all."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sdk.api.errors import RequestError
from sdk.tools import MessageDelta, MessageParser, ToolCall, all_formats, format_named
from sdk.tools.reasoning import reasoning_named
from tests.tools.outputs import OUTPUTS, TOOLS, parse

THINK = reasoning_named("think")


def calls(format: str, text: str) -> tuple[ToolCall, ...]:
    return parse([text], format).message.tool_calls


def content(format: str | None, text: str, **options: Any) -> str:
    message = parse([text], format, **options).message
    assert message.tool_calls == ()
    return message.content


# Text that is not a call


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "  Two  spaces,\n\n\ttabs and a line break at the end \n",
        "a < b and b > c, [x], {y}, <tag>, <tool, ``` and </think>",
        "日本語 ｜ 🙂 é",
    ],
)
@pytest.mark.parametrize("format", [None, *(one.name for one in all_formats())])
def test_text_without_marks_is_unchanged(format: str | None, text: str) -> None:
    assert content(format, text) == text


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "Use <tool_call> and </tool_call> for calls."),
        ("hermes", '<tool_call>\n{"name": "get_wea'),
        ("hermes", '<tool_call>\n{"arguments": {"city": "Paris"}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'now'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "' + "x" * 300 + '"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\q"}</tool_call>'),
        ("hermes", "<tool_call>[3]</tool_call>"),
        ("hermes", "<tool_call"),
        ("qwen3_coder", "<tool_call><function=>"),
        ("qwen3_coder", "<function=" + "x" * 300),
        ("llama_json", '{"name": "unknown", "parameters": {}}'),
        ("llama_json", 'Text:\n{"name": "unknown", "parameters": {}}'),
        ("llama_json", '{"city": "Paris"}'),
        ("llama_json", "<|python_tag|>print(1)"),
        ("llama_json", 'Inline: {"name": "now", "parameters": {}}'),
        ("pythonic", '[unknown(city="Paris")]'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[get_weather, now]"),
        ("pythonic", 'See [get_weather(city="Paris")]'),
        ("mistral_args", "[TOOL_CALLS] "),
        ("mistral_args", "[TOOL_CALLS]now and"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>now"),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```py",
        ),
        ("gemma_text", "```tool_code\nx = 1 + 2\nprint(x)\n```"),
        ("gemma_text", "```tool_code\nprint(now())"),
        ("gemma_text", '```json\n{"a": 1}\n```'),
        ("functiongemma", "<start_function_call>now{}<end_function_call>"),
        ("functiongemma", "<start_function_call>call:now<end_function_call>"),
        ("granite_list", "[1] A footnote"),
        ("smollm3", "<code>\nfor x in y:\n    print(x)\n</code>"),
        ("smollm3", '<code>\nget_weather(city=f"{x}")\n</code>'),
        ("smollm3", '<code>\nget_weather(city="a" + "b")\n</code>'),
        ("olmo3", "<function_calls>\nunknown(1)\n</function_calls>"),
        ("harmony", "Plain text."),
        ("harmony", "<|channel|>final"),
        ("harmony", "<|channel|>" + "x" * 600),
        ("harmony", "<|start|>assistant to=a!b<|channel|>commentary<|message|>{}"),
    ],
)
def test_what_only_looks_like_a_call_is_content(format: str, text: str) -> None:
    assert content(format, text) == text
    assert parse(list(text), format).message.content == text


def test_without_tools_there_are_no_calls() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert content("hermes", text, tools=()) == text
    assert content("llama_json", '{"name": "now", "parameters": {}}<|eot_id|>', tools=()) == (
        '{"name": "now", "parameters": {}}'
    )


def test_channels_are_read_without_tools() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    message = parse([text], "harmony", tools=()).message
    assert (message.reasoning, message.content) == ("Hm.", "Hi")


# Broken calls


@pytest.mark.parametrize(
    ("format", "text", "arguments", "error"),
    [
        ("hermes", '<tool_call>{"name": "now"', "", "the answer ends inside the call"),
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
            '{"city": "Par',
            "the answer ends inside the call",
        ),
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": {"city": ]} x</tool_call>',
            '{"city": ]} x',
            "the arguments are not JSON: unexpected ']'",
        ),
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": {city: 1}}</tool_call>',
            "{city: 1}",
            "the arguments are not JSON",
        ),
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
            "[1]",
            "not a JSON object but '[1]'",
        ),
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": {"days": NaN}}</tool_call>',
            '{"days": NaN}',
            "NaN is not JSON",
        ),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 70 + "</tool_call>",
            '{"a":' * 70,
            "nested more than 64 deep",
        ),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1',
            '"{\\"a\\": 1',
            "the arguments are not JSON: the answer ends inside the call",
        ),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": "\\q"}</tool_call>',
            '"\\q"}',
            "the arguments are not JSON: Invalid",
        ),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": }</tool_call>',
            "}",
            "expected a JSON value",
        ),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {}; }</tool_call>',
            "{}; }",
            "expected '}' in the call, found ';'",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=city>Par\n",
            '{"city": "Par\\n',
            "the answer ends inside the call",
        ),
        (
            "qwen3_coder",
            "<function=get_weather><parameter=days>\n3",
            '{"days": 3',
            "the answer ends inside the call",
        ),
        (
            "qwen3_coder",
            "<function=now><parameter=x>\n[NaN]\n</parameter></function>",
            '{"x": [NaN]\n</parameter>',
            "an argument has no JSON",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather>oops</function></tool_call>",
            "{oops</function>",
            "expected '<parameter=' in the call, found 'o'",
        ),
        ("pythonic", "[get_weather(city=paris)]", "{city=paris)]", "expected a literal"),
        (
            "pythonic",
            "[get_weather(paris)]",
            "{paris)]",
            "expected a literal in the call, found 'paris'",
        ),
        ("pythonic", "[get_weather(city=", "{city=", "the answer ends inside the call"),
        ("pythonic", "[get_weather(city=)]", "{city=)]", "expected a value in the call, found ')'"),
        ("pythonic", '[get_weather(city="Paris', '{city="Paris', "the answer ends inside the call"),
        (
            "pythonic",
            "[get_weather(city=" + "[" * 70,
            "{city=" + "[" * 70,
            "nested more than 64 deep",
        ),
        ("pythonic", "[get_weather(days=1e999)]", "{days=1e999)]", "expected a literal"),
        ("pythonic", "[now(1)]", "{1)]", "now() takes 0 arguments"),
        ("pythonic", "[now({None: 1})]", "{{None: 1})]", "expected a string as key"),
        (
            "pythonic",
            "[get_weather(city='\\ud800')]",
            "{city='\\ud800')]",
            "an escape that is not a character",
        ),
        ("pythonic", "[get_weather(city='\\xzz')]", "{city='\\xzz')]", "an incomplete escape"),
        (
            "pythonic",
            '[get_weather(city="Paris", days=x)]',
            '{"city": "Paris", days=x)]',
            "expected a literal",
        ),
        (
            "functiongemma",
            "<start_function_call>call:get_weather{city:<escape>A<escape>,days}",
            '{"city": "A",days}',
            "expected ':'",
        ),
        (
            "qwen3_coder",
            "<function=get_weather><parameter=city>Paris</parameter><parameter=days>3</parameter>;",
            '{"city": "Paris", "days": 3;',
            "expected '<parameter='",
        ),
        (
            "mistral_args",
            '[TOOL_CALLS]get_weather[ARGS]{"city"',
            '{"city"',
            "the answer ends inside the call",
        ),
        (
            "functiongemma",
            "<start_function_call>call:get_weather{city<end_function_call>",
            "{city",
            "expected ':'",
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.now<|message|>code<|call|>",
            "code",
            "the arguments are not JSON",
        ),
    ],
)
def test_a_call_that_breaks_after_its_name_is_invalid(
    format: str, text: str, arguments: str, error: str
) -> None:
    for pieces in ([text], list(text)):
        (call,) = parse(pieces, format).message.tool_calls
        assert error in str(call.error)
        assert call.arguments == arguments


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "fly", "arguments": {"to": "Oz"}}</tool_call>'),
        ("qwen3_coder", "<function=fly><parameter=to>Oz</parameter></function>"),
        ("mistral_args", '[TOOL_CALLS]fly[ARGS]{"to": "Oz"}'),
        (
            "functiongemma",
            "<start_function_call>call:fly{to:<escape>Oz<escape>}<end_function_call>",
        ),
        ("harmony", '<|channel|>commentary to=functions.fly<|message|>{"to": "Oz"}<|call|>'),
    ],
)
def test_a_mark_makes_a_call_of_an_unknown_tool(format: str, text: str) -> None:
    (call,) = calls(format, text)
    assert (call.name, json.loads(call.arguments)) == ("fly", {"to": "Oz"})
    assert call.error == "there is no tool 'fly'; the tools are: get_weather, get_time, now"


def test_the_end_of_an_invalid_call_is_the_end_of_its_block() -> None:
    broken = '<tool_call>{"name": "get_weather", "arguments": {"city": ]}</tool_call>'
    right = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = parse([f"A {broken} B {right}"], "hermes").message
    assert [call.error is None for call in message.tool_calls] == [False, True]
    assert message.content == "A B"


def test_the_end_of_the_turn_ends_an_invalid_call() -> None:
    message = parse(["[get_weather(city=x)]<|eot|>"], "pythonic").message
    assert [call.arguments for call in message.tool_calls] == ["{city=x)]"]
    assert message.content == ""


def test_calls_before_a_broken_one_stay() -> None:
    text = '<tool_call>[{"name": "now", "arguments": {}}, {"nam'
    message = parse([text], "hermes").message
    assert [call.name for call in message.tool_calls] == ["now"]
    assert message.content == ', {"nam'


def test_line_breaks_in_strings_of_json_are_escaped() -> None:
    (call,) = calls(
        "hermes", '<tool_call>{"name": "get_time", "arguments": {"zone": "a\n\tb\x00"}}</tool_call>'
    )
    assert json.loads(call.arguments) == {"zone": "a\n\tb\x00"}


def test_marks_in_strings_of_json_are_text() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {"zone": "</tool_call>\\""}}</tool_call>'
    (call,) = calls("hermes", text)
    assert json.loads(call.arguments) == {"zone": '</tool_call>"'}


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'a'", "a"),
        ('"""a\n"b\'"""', "a\n\"b'"),
        (r"'\'\"\\\n\t\x41\u00e9\U0001F600\/\q'", "'\"\\\n\tAé😀/\\q"),
        (r"'\ud83d\ude00'", "😀"),
        ("'a\\\nb'", "ab"),
        ("''", ""),
        ("-3", -3),
        ("1_000", 1000),
        ("+1.5e3", 1500.0),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("[1, 'a', [], (2,), {'k': {}}]", [1, "a", [], [2], {"k": {}}]),
        ("{'a': [1], 2: 'b',}", {"a": [1], "2": "b"}),
    ],
)
def test_python_literals_become_json(literal: str, value: object) -> None:
    for pieces in ([f"[now(x={literal})]"], list(f"[now(x={literal})]")):
        (call,) = parse(pieces, "pythonic").message.tool_calls
        assert call.error is None
        assert json.loads(call.arguments) == {"x": value}


# Whitespace and marks


def test_whitespace_next_to_marks_belongs_to_them() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert parse([f"\n\nA\n\n{call}\n{call}\n\nB \n"], "hermes").message.content == "\n\nA\n\nB \n"
    assert parse([f" {call} "], "hermes").message.content == ""
    assert parse([f"A {call} \n "], "hermes").message.content == "A"


def test_the_end_of_the_turn_is_no_text() -> None:
    assert content("hermes", "Hi.\n<|im_end|>") == "Hi."
    assert content("hermes", "Hi.<|im_end|>\n<|endoftext|>\n") == "Hi."
    assert (
        content("hermes", "The token <|im_end|> ends a turn.")
        == "The token <|im_end|> ends a turn."
    )


def test_all_words_of_an_answer_are_in_the_message() -> None:
    chance = random.Random(0)
    marks = {mark for one in all_formats() for mark in (*one.marks, *one.turn_ends)}
    shapes = ['{"name": "now", "arguments": "', '{"name": "get_time", "parameters": {']
    shapes += ["get_weather(", '{"name": "now", "arguments": {"a": ', "call:now{", "now[ARGS]{"]
    others = ["{", "}", "[", "]", '"', ":", ",", "\n", "<think>", "</think>", "(", ")", "=", "<"]
    parts = [*sorted(marks), *shapes, *others]
    for format in all_formats():
        if format.channels:  # headers are not part of a message
            continue
        for _ in range(60):
            words = [f"word{index}" for index in range(20)]
            text = "".join(chance.choice(parts) + chance.choice(["", " "]) + word for word in words)
            message = parse([text], format.name, "think").message
            kept = message.content + message.reasoning
            kept += "".join(call.name + call.arguments for call in message.tool_calls)
            assert [word for word in words if word not in kept] == [], (format.name, text)


# Reasoning


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nA\n\nB\n</think>\n\nC", False, "A\n\nB", "C"),
        ("\n<think>A</think>C", False, "A", "C"),
        ("A\n</think>\nC", True, "A", "C"),
        ("<think>A</think>C", True, "A", "C"),
        ("<think>A without an end \n", False, "A without an end \n", ""),
        ("A without an end", True, "A without an end", ""),
        ("<think></think>C", False, "", "C"),
        ("C <think>no</think>", False, "", "C <think>no</think>"),
        ("C </think>", False, "", "C </think>"),
        ("<think>A</think>B</think>", False, "A", "B</think>"),
    ],
)
def test_reasoning_is_separated(text: str, opened: bool, reasoning: str, content: str) -> None:
    for format in ("hermes", None):
        for pieces in ([text], list(text)):
            message = parse(pieces, format, "think", opened).message
            assert (message.reasoning, message.content) == (reasoning, content)


def test_reasoning_is_content_if_nothing_separates_it() -> None:
    assert content("hermes", "<think>A</think>B") == "<think>A</think>B"


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_may_open_the_reasoning(prompt: str, opens: bool) -> None:
    assert THINK.opened_by(prompt) is opens


# The interface


def test_deltas_tell_what_is_new() -> None:
    parser = MessageParser(format_named("hermes"), THINK, TOOLS, new_id=lambda: "id")
    assert parser.push("<thi") == MessageDelta()
    assert not parser.push("nk>")
    assert parser.push("Hm.") == MessageDelta(reasoning="Hm.")
    assert parser.push("</think>\n\nI ") == MessageDelta(content="I")
    assert parser.push("look. <tool_") == MessageDelta(content=" look.")
    delta = parser.push('call>{"name": "now", "arguments": {"a": ')
    assert [call._asdict() for call in delta.tool_calls] == [
        {"index": 0, "id": "id", "name": "now", "arguments": '{"a": ', "error": None}
    ]
    (rest,) = parser.push('"b"}}</tool_call>').tool_calls
    assert (rest.id, rest.name, rest.arguments) == (None, None, '"b"}')
    assert parser.finish() == MessageDelta()
    assert parser.message.as_dict() == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "id", "type": "function", "function": {"name": "now", "arguments": '{"a": "b"}'}}
        ],
    }
    parsed = parser.message.as_dict(parsed_arguments=True)
    assert parsed["tool_calls"][0]["function"]["arguments"] == {"a": "b"}


def test_arguments_that_are_no_json_stay_text() -> None:
    broken = parse(['<tool_call>{"name": "now", "arguments": {"'], "hermes").message
    call = broken.as_dict(parsed_arguments=True)["tool_calls"][0]
    assert call["function"]["arguments"] == '{"'


def test_ids_are_random_and_what_the_family_wants() -> None:
    for name, length in (("hermes", 29), ("mistral_args", 9)):
        text = next(one.text for one in OUTPUTS if one.format == name and len(one.calls) == 2)
        parser = MessageParser(format_named(name), None, TOOLS)
        parser.push(text)
        parser.finish()
        first, second = parser.message.tool_calls
        assert first.id != second.id
        assert len(first.id) == len(second.id) == length
        assert name == "hermes" or first.id.isalnum()


def test_nothing_comes_after_the_end() -> None:
    parser = MessageParser(None)
    assert parser.push("a") == MessageDelta("a")
    assert parser.push("") == MessageDelta()
    assert parser.finish() == parser.finish() == MessageDelta()
    with pytest.raises(RequestError, match="the answer has ended"):
        parser.push("b")


# Cost


def work(function: Callable[[], object]) -> int:
    """How many functions of Python and C are called."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("format", "beginning", "part"),
    [
        ("hermes", "", "hello wor<d "),
        ("hermes", "", " \n"),
        ("hermes", "", "<tool_call>"),
        ("hermes", "", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "', "abc\\n"),
        ("hermes", '<tool_call>{"arguments": {"a": [', "{}, 1, "),
        ("qwen3_coder", "<function=get_weather><parameter=city>", "ab\n<"),
        ("llama_json", "", "{abc} e\n"),
        ("llama_json", "", "[{"),
        ("pythonic", "[get_weather(city=[", "1, "),
        ("pythonic", "[get_weather(city='", "ab\\n"),
        ("smollm3", "<code>", "x = 1\n"),
        ("harmony", "", "<|channel|>"),
        ("functiongemma", "<start_function_call>call:now{a:<escape>", "ab<"),
    ],
)
def test_the_work_is_linear_in_the_length(format: str, beginning: str, part: str) -> None:
    def pushed(length: int) -> int:
        text = beginning + part * (length // len(part))
        parser = MessageParser(format_named(format), THINK, TOOLS)
        longest = 0

        def run() -> None:
            nonlocal longest
            for character in text:
                parser.push(character)
                longest = max(longest, len(parser._stream._text))
            parser.finish()

        count = work(run)
        # Only the possible beginning of a mark is looked at again.
        assert longest <= 64
        return count

    pushed(400)  # makes what is made once
    assert pushed(8_000) < 2.2 * pushed(4_000)
