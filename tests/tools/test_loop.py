"""The loop that runs tools, with scripted answers."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import pydantic
import pytest

from sdk.api.errors import RequestError, ToolError
from sdk.tools import AssistantMessage, Tool, ToolCall, ToolRun, arun_tools, result_text, run_tools

QUESTION = [{"role": "user", "content": "How is the weather?"}]


class Unit(enum.Enum):
    CELSIUS = "celsius"


@dataclasses.dataclass
class Place:
    city: str
    zip: int = 0


def get_weather(place: Place, unit: Unit = Unit.CELSIUS) -> dict[str, Any]:
    """The weather of a place."""
    assert isinstance(place, Place) and isinstance(unit, Unit)
    return {"city": place.city, "degrees": 21.5, "unit": unit}


def fail(text: str) -> None:
    """Fail."""
    raise ValueError(f"cannot {text}")


def answer(*calls: tuple[str, str], content: str = "") -> AssistantMessage:
    made = [ToolCall(f"id-{index}", *call, index) for index, call in enumerate(calls)]
    return AssistantMessage(content, "", tuple(made))


def scripted(*answers: AssistantMessage) -> Callable[[list[dict[str, Any]]], AssistantMessage]:
    rest = iter(answers)
    return lambda messages: next(rest)


PARIS = ("get_weather", '{"place": {"city": "Paris"}, "unit": "celsius"}')


def contents(run: ToolRun) -> list[str]:
    return [message["content"] for message in run.messages if message["role"] == "tool"]


def test_tools_run_until_the_model_answers() -> None:
    seen: list[int] = []
    answers = iter([answer(PARIS, content="I look."), answer(content="It is 21.5 degrees.")])

    def chat(messages: list[dict[str, Any]]) -> AssistantMessage:
        seen.append(len(messages))
        messages.clear()  # its own copy
        return next(answers)

    run = run_tools(chat, QUESTION, [get_weather])
    assert (run.stopped, run.turns, run.output.content) == ("answered", 2, "It is 21.5 degrees.")
    assert seen == [1, 3]
    assert run.messages == [
        {"role": "user", "content": "How is the weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "id-0",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": PARIS[1]},
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "id-0",
            "name": "get_weather",
            "content": '{"city": "Paris", "degrees": 21.5, "unit": "celsius"}',
        },
        {"role": "assistant", "content": "It is 21.5 degrees."},
    ]
    assert QUESTION == [{"role": "user", "content": "How is the weather?"}]


def test_templates_may_get_arguments_as_objects() -> None:
    run = run_tools(
        scripted(answer(PARIS), answer()), QUESTION, [get_weather], parsed_arguments=True
    )
    (call,) = run.messages[1]["tool_calls"]
    assert call["function"]["arguments"] == json.loads(PARIS[1])


def test_several_calls_of_an_answer_run_in_order() -> None:
    lyon = ("get_weather", '{"place": {"city": "Lyon"}}')
    run = run_tools(scripted(answer(PARIS, lyon), answer()), QUESTION, [get_weather])
    assert [json.loads(text)["city"] for text in contents(run)] == ["Paris", "Lyon"]
    assert [one["tool_call_id"] for one in run.messages[2:4]] == ["id-0", "id-1"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("fail", '{"text": "do it"}'), "Error: ValueError: cannot do it"),
        (("fly", "{}"), "Error: there is no tool 'fly'; the tools are: get_weather, fail"),
        (("fail", '{"text": '), "Error: the arguments are not JSON"),
        (("fail", "[]"), "Error: the arguments are not a JSON object but '[]'"),
        (("fail", "{}"), "Error: fail needs the parameters: text"),
        (
            ("fail", '{"text": "a", "loud": true}'),
            "Error: fail has no parameter 'loud'; its parameters are: text",
        ),
        (("fail", '{"text": 3}'), "Error: fail: text: ValueError: expected str, found 3"),
        (
            ("get_weather", '{"place": {"zip": 1}}'),
            "Error: get_weather: place: ValueError: Place lacks city",
        ),
        (("get_weather", '{"place": {"city": "a"}, "unit": "K"}'), "Error: get_weather: unit: "),
    ],
)
def test_an_error_goes_back_to_the_model(call: tuple[str, str], message: str) -> None:
    tools = [get_weather, fail]
    run = run_tools(scripted(answer(call), answer(content="Sorry.")), QUESTION, tools)
    (found,) = contents(run)
    assert found.startswith(message)
    assert run.output.content == "Sorry."
    with pytest.raises(ToolError, match=f"^{call[0]}: "):
        run_tools(scripted(answer(call)), QUESTION, tools, on_error="raise")


def test_a_raised_error_has_its_cause() -> None:
    with pytest.raises(ToolError, match="fail: ValueError: cannot do it") as caught:
        run_tools(
            scripted(answer(("fail", '{"text": "do it"}'))), QUESTION, [fail], on_error="raise"
        )
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_invalid_call_goes_back_to_the_model() -> None:
    broken = AssistantMessage(tool_calls=(ToolCall("id", "fail", '{"te', 0, "the answer ends"),))
    run = run_tools(scripted(broken, answer()), QUESTION, [fail])
    assert contents(run) == ["Error: the answer ends"]


def test_the_number_of_turns_is_limited() -> None:
    run = run_tools(scripted(*[answer(PARIS)] * 5), QUESTION, [get_weather], max_turns=3)
    assert (run.stopped, run.turns) == ("max_turns", 3)
    assert len(contents(run)) == 2
    assert run.messages[-1]["role"] == "assistant" and run.output.tool_calls


def test_tools_without_a_function_are_left_to_the_caller() -> None:
    tool = Tool("search", "", {"type": "object", "properties": {}})
    run = run_tools(scripted(answer(PARIS, ("search", "{}"))), QUESTION, [get_weather, tool])
    assert (run.stopped, run.turns, contents(run)) == ("not_run", 1, [])


def test_a_tool_with_a_schema_of_its_own_gets_what_json_gives() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = Tool("double", "", schema, lambda a: a * 2)
    run = run_tools(scripted(answer(("double", '{"a": 4}')), answer()), QUESTION, [tool])
    assert contents(run) == ["8"]


def test_a_schema_without_properties_takes_any_arguments() -> None:
    tool = Tool("make", "", {"type": "object"}, lambda **given: given)
    run = run_tools(scripted(answer(("make", '{"a": [1]}')), answer()), QUESTION, [tool])
    assert contents(run) == ['{"a": [1]}']


def test_a_function_without_a_signature_gets_what_json_gives() -> None:
    tool = Tool("make", "", {"type": "object", "properties": {"a": {}}}, dict)
    run = run_tools(scripted(answer(("make", '{"a": [1]}')), answer()), QUESTION, [tool])
    assert contents(run) == ['{"a": [1]}']


def test_arguments_that_are_nested_too_deeply_are_an_error() -> None:
    call = ("fail", '{"text": ' + "[" * 200_000)
    (text,) = contents(run_tools(scripted(answer(call), answer()), QUESTION, [fail]))
    assert text == "Error: the arguments are nested too deeply"


def test_ctrl_c_in_a_tool_reaches_the_caller() -> None:
    def stop() -> None:
        """Stop."""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tools(scripted(answer(("stop", "{}"))), QUESTION, [stop])


async def wait_for(other: str) -> str:
    """Wait."""
    await asyncio.sleep(0)
    return f"waited for {other}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 0}, "max_turns: expected an integer of at least 1, found 0"),
        ({"max_turns": True}, "max_turns: expected"),
        ({"on_error": "ignore"}, "on_error: expected 'message' or 'raise', found 'ignore'"),
        ({"messages": "Hi"}, "messages: expected a list of dicts, found 'Hi'"),
        ({"messages": ["Hi"]}, "messages: expected dicts, found 'Hi'"),
        ({"tools": 3}, "tools: expected a list"),
        ({"tools": [wait_for]}, "wait_for is a coroutine function; use arun_tools"),
        ({"chat": lambda messages: "Hi"}, "expected it to return an AssistantMessage, found 'Hi'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    given = {"chat": scripted(answer()), "messages": QUESTION, "tools": [fail], **options}
    with pytest.raises(RequestError, match=message):
        run_tools(**given)


# With asyncio


def run_async(*answers: AssistantMessage, tools: list[Any], **options: Any) -> ToolRun:
    rest = iter(answers)

    async def chat(messages: list[dict[str, Any]]) -> AssistantMessage:
        await asyncio.sleep(0)
        return next(rest)

    return asyncio.run(arun_tools(chat, QUESTION, tools, **options))


def test_coroutine_functions_and_others_are_awaited() -> None:
    calls = answer(("wait_for", '{"other": "x"}'), PARIS, ("fail", '{"text": "do it"}'))
    run = run_async(calls, answer(content="Done."), tools=[wait_for, get_weather, fail])
    assert contents(run)[0] == "waited for x"
    assert json.loads(contents(run)[1])["city"] == "Paris"
    assert contents(run)[2] == "Error: ValueError: cannot do it"
    assert (run.stopped, run.output.content) == ("answered", "Done.")


def test_coroutine_functions_of_an_answer_run_at_the_same_time() -> None:
    first, second = asyncio.Event(), asyncio.Event()

    async def one() -> str:
        """Ends only if the other one runs."""
        first.set()
        await asyncio.wait_for(second.wait(), 60)
        return "one"

    async def two() -> str:
        """Ends only if the other one runs."""
        second.set()
        await asyncio.wait_for(first.wait(), 60)
        return "two"

    run = run_async(answer(("one", "{}"), ("two", "{}")), answer(), tools=[one, two])
    assert contents(run) == ["one", "two"]


def test_an_error_cancels_the_other_calls() -> None:
    cancelled = []

    async def forever() -> None:
        """Wait until cancelled."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    calls = answer(("forever", "{}"), ("fail", '{"text": "do it"}'))
    with pytest.raises(ToolError, match="cannot do it"):
        run_async(calls, tools=[forever, fail], on_error="raise")
    assert cancelled == [True]


# Results


class Point(NamedTuple):
    x: int
    y: int


class Model(pydantic.BaseModel):
    day: datetime.date


class Name(str, enum.Enum):
    A = "a"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is: é", "as it is: é"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ([1, "é", (2,)], '[1, "é", [2]]'),
        ({"a": {1}, 3: None}, '{"a": [1], "3": null}'),
        (Place("Paris"), '{"city": "Paris", "zip": 0}'),
        ([Place("Paris")], '[{"city": "Paris", "zip": 0}]'),
        (Point(1, 2), '{"x": 1, "y": 2}'),
        (Model(day=datetime.date(2025, 1, 2)), '{"day": "2025-01-02"}'),
        ({"m": [Model(day=datetime.date(2025, 1, 2))]}, '{"m": [{"day": "2025-01-02"}]}'),
        (Unit.CELSIUS, "celsius"),
        (Name.A, "a"),
        ({Unit.CELSIUS: Unit.CELSIUS}, '{"celsius": "celsius"}'),
        (datetime.datetime(2025, 1, 2, 3, 4), "2025-01-02T03:04:00"),
        (pathlib.PurePosixPath("/a"), "/a"),
        (uuid.UUID(int=0), "00000000-0000-0000-0000-000000000000"),
        (decimal.Decimal("1.10"), "1.10"),
    ],
)
def test_results_become_text(value: object, text: str) -> None:
    assert result_text(value) == text


def nested(depth: int) -> list[Any]:
    return [] if depth == 0 else [nested(depth - 1)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "the result has no JSON: object; return a string"),
        (b"bytes", "the result has no JSON: bytes"),
        (Place, "the result has no JSON: type"),
        (float("nan"), "not JSON compliant"),
        (nested(70), "nested more than 64 deep"),
    ],
)
def test_results_without_json_are_errors(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        result_text(value)

    def give() -> Any:
        """Give."""
        return value

    run = run_tools(scripted(answer(("give", "{}")), answer()), QUESTION, [give])
    assert contents(run)[0].startswith("Error: ValueError: ")
