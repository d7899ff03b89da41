"""``returns=`` and ``tools=``: values of types, and messages with calls, from real answers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest

from sdk import LLM, SamplingParams
from sdk.api.errors import RequestError
from sdk.tools import AssistantMessage

LIMITED = SamplingParams(temperature=0.8, seed=4, max_tokens=120)
PROMPT = {"prompt_token_ids": [5, 9, 30, 31, 200, 17]}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


@dataclasses.dataclass
class Line:
    text: str
    count: int = 1


class Invoice(pydantic.BaseModel):
    number: int
    kind: Literal["paid", "open"]


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, max_model_len=1024, memory="1GiB") as llm:
        yield llm


@pytest.mark.parametrize("kind", [int, list[int], Line, Invoice, Literal["a", "b"], list[Line]])
def test_the_value_of_a_type(tiny: LLM, kind: Any) -> None:
    outputs = tiny.generate([PROMPT, PROMPT], LIMITED, returns=kind)
    assert len(outputs) == 2
    for output in outputs:
        answer = output.outputs[0]
        expected = answer.parsed
        assert output.parsed is expected
        pydantic.TypeAdapter(kind).validate_python(
            dataclasses.asdict(expected) if dataclasses.is_dataclass(expected) else expected
        )
        assert answer.partial == json.loads(answer.text)


def test_a_schema_gives_plain_values(tiny: LLM) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
    [output] = tiny.generate(PROMPT, LIMITED, returns=schema)
    assert len(output.parsed) in (2, 3) and set(output.parsed) <= {True, False}


def test_several_answers_have_a_value_each(tiny: LLM) -> None:
    [output] = tiny.generate(PROMPT, LIMITED.clone(n=3), returns=Line)
    values = [answer.parsed for answer in output.outputs]
    assert all(isinstance(value, Line) for value in values)
    assert len({value.text for value in values}) > 1


def test_a_stream_grows(tiny: LLM) -> None:
    seen = []
    for piece in tiny.stream(PROMPT, LIMITED, returns=Line):
        answer = piece.outputs[0]
        seen.append(answer.partial)
        if answer.finish_reason is None:
            with pytest.raises(RequestError, match="has not ended"):
                _ = answer.parsed
    assert seen[-1] == {"text": seen[-1]["text"], **seen[-1]}
    texts = [part.get("text", "") for part in seen if part is not None]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert isinstance(piece.parsed, Line)
    [whole] = tiny.generate(PROMPT, LIMITED, returns=Line)
    assert whole.parsed == piece.parsed


def test_the_async_twins(tiny: LLM) -> None:
    async def run() -> list[Any]:
        outputs = await tiny.agenerate(PROMPT, LIMITED, returns=Line)
        stream = tiny.astream(PROMPT, LIMITED, returns=Line)
        return [outputs[0].parsed, [piece async for piece in stream][-1].parsed]

    first, second = asyncio.run(run())
    assert first == second == tiny.generate(PROMPT, LIMITED, returns=Line)[0].parsed


def test_an_answer_that_was_cut_off_has_no_value(tiny: LLM) -> None:
    stops = LIMITED.clone(stop=["a", "e", "0", "1", " ", '"', "["], max_tokens=100, n=1)
    [output] = tiny.generate(PROMPT, stops.clone(deadline=1e-6), returns=list[Line])
    assert output.outputs[0].finish_reason == "deadline"
    with pytest.raises(RequestError, match="ended with 'deadline'"):
        _ = output.parsed


def test_returns_excludes_what_it_replaces(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="returns has its own structure"):
        tiny.generate(PROMPT, LIMITED.clone(structured_outputs={"regex": "a"}), returns=int)
    with pytest.raises(RequestError, match="bytes has no JSON Schema"):
        tiny.generate(PROMPT, LIMITED, returns=bytes)
    with pytest.raises(RequestError, match="detokenize"):
        tiny.generate(PROMPT, LIMITED.clone(detokenize=False), returns=int)


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> dict[str, Any]:
    """Get the current weather of a city."""
    return {"city": city, "temperature": 21, "unit": unit}


GREEDY = SamplingParams(temperature=0, max_tokens=120)


def test_a_required_tool_is_called(smol: LLM) -> None:
    [output] = smol.chat(QUESTION, GREEDY, tools=[get_weather], tool_choice="required")
    [call] = output.message.tool_calls
    assert (call.name, call.error) == ("get_weather", None)
    arguments = json.loads(call.arguments)
    assert set(arguments) <= {"city", "unit"} and isinstance(arguments["city"], str)
    assert output.outputs[0].finish_reason == "stop"


def test_the_deltas_of_a_stream_add_up(smol: LLM) -> None:
    [whole] = smol.chat(QUESTION, GREEDY, tools=[get_weather], tool_choice="get_weather")
    arguments, names = "", []
    for piece in smol.stream(QUESTION, GREEDY, tools=[get_weather], tool_choice="get_weather"):
        for delta in piece.outputs[0].delta.tool_calls:
            arguments += delta.arguments
            names += [delta.name] if delta.name else []
    assert names == ["get_weather"]
    assert arguments == whole.message.tool_calls[0].arguments
    assert piece.message.tool_calls[0].arguments == arguments


def test_without_a_call_the_message_is_the_text(smol: LLM) -> None:
    for choice in ("auto", "none"):
        [output] = smol.chat(
            QUESTION, GREEDY.clone(max_tokens=30), tools=[get_weather], tool_choice=choice
        )
        assert output.message == AssistantMessage(content=output.outputs[0].text.strip("\n"))


def test_tools_run_until_there_is_an_answer(smol: LLM) -> None:
    run = smol.run_tools(
        QUESTION, [get_weather], GREEDY.clone(max_tokens=60), tool_choice="required", max_turns=3
    )
    roles = [message["role"] for message in run.messages]
    assert roles[:3] == ["user", "assistant", "tool"]
    assert json.loads(run.messages[2]["content"])["temperature"] == 21
    assert run.turns == sum(role == "assistant" for role in roles) <= 3

    async def later() -> Any:
        return await smol.arun_tools(
            QUESTION,
            [get_weather],
            GREEDY.clone(max_tokens=60),
            tool_choice="required",
            max_turns=3,
        )

    assert [m["content"] for m in asyncio.run(later()).messages] == [
        m["content"] for m in run.messages
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [3]}, "tools"),
        ({"tools": [get_weather], "tool_choice": "get_rain"}, "get_rain"),
        ({"tools": [get_weather], "tool_format": "hermess"}, "did you mean 'hermes'"),
        ({"tools": [get_weather], "returns": int}, "cannot be combined"),
        ({"tool_choice": "required"}, "needs tools"),
    ],
    ids=["no tool", "no such tool", "no such format", "returns too", "no tools"],
)
def test_bad_tools_are_refused(smol: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        smol.chat(QUESTION, GREEDY, **options)


def test_tools_and_another_structure_are_refused(smol: LLM) -> None:
    with pytest.raises(RequestError, match="tool_choice='none'"):
        smol.chat(QUESTION, GREEDY.clone(structured_outputs={"regex": "a"}), tools=[get_weather])
