"""Documented answers of every family: the message, in any split."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from sdk.tools import AssistantMessage, all_formats
from tests.tools.outputs import OUTPUTS, Output, added_up, by_name, parse_output


def split(text: str, cuts: list[int]) -> list[str]:
    """The pieces between sorted positions."""
    ends = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


def whole(output: Output) -> AssistantMessage:
    return parse_output(output, [output.text]).message


@pytest.mark.parametrize("output", OUTPUTS, ids=by_name)
def test_a_documented_answer_is_understood(output: Output) -> None:
    message = whole(output)
    assert [call.error for call in message.tool_calls] == [None] * len(output.calls)
    found = tuple((call.name, json.loads(call.arguments)) for call in message.tool_calls)
    assert found == output.calls
    assert (message.content, message.reasoning) == (output.content, output.reasoning)
    assert [call.index for call in message.tool_calls] == list(range(len(output.calls)))


def test_every_format_has_documented_answers_with_and_without_text() -> None:
    named = {output.format for output in OUTPUTS if output.calls}
    assert named == {one.name for one in all_formats()}


@pytest.mark.parametrize("output", OUTPUTS, ids=by_name)
def test_splits_do_not_change_the_message(output: Output) -> None:
    expected = whole(output)
    chance = random.Random(output.name)
    texts = [list(output.text)]
    for _ in range(100):
        cuts = chance.choices(range(len(output.text) + 1), k=chance.randint(1, 20))
        texts.append(split(output.text, cuts))
    for pieces in texts:
        parsed = parse_output(output, pieces)
        assert parsed.message == expected, pieces
        assert added_up(parsed.deltas) == expected, pieces


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_split_of_damaged_answers_changes_the_message(data: st.DataObject) -> None:
    """Cut off, with a part removed, or with a part of another answer inserted."""
    output = data.draw(st.sampled_from(OUTPUTS))
    other = data.draw(st.sampled_from(OUTPUTS)).text
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(output.text))] * 2)))
    text = (
        output.text[:start] + data.draw(st.sampled_from(["", other, "{", "x"])) + output.text[stop:]
    )
    damaged = output._replace(text=text)
    expected = whole(damaged)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    parsed = parse_output(damaged, split(text, cuts))
    assert parsed.message == expected
    assert added_up(parsed.deltas) == expected
    for call in expected.tool_calls:
        if call.error is None:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("output", OUTPUTS, ids=by_name)
def test_the_name_of_a_call_comes_before_its_arguments(output: Output) -> None:
    seen: list[int] = []
    for delta in parse_output(output, list(output.text)).deltas:
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.id is not None
                seen.append(call.index)
            assert seen and call.index == seen[-1]


def test_arguments_arrive_while_they_are_written() -> None:
    output = next(one for one in OUTPUTS if one.name == "hermes")
    deltas = parse_output(output, list(output.text)).deltas
    pieces = [call.arguments for delta in deltas for call in delta.tool_calls if call.arguments]
    assert pieces == list('{"city": "Paris"}')


def test_strings_of_xml_calls_arrive_while_they_are_written() -> None:
    output = next(one for one in OUTPUTS if one.name == "coder")
    deltas = parse_output(output, list(output.text)).deltas
    pieces = [call.arguments for delta in deltas for call in delta.tool_calls if call.arguments]
    assert pieces == ["{", '"city": "', *"Paris", '"', ', "days": ', "3", "}"]
