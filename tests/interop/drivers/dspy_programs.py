"""Programs of DSPy on a model in this process, with pytest.

``pytest dspy_programs.py`` with the environment variables ``CHAT_MODEL`` and ``PAGE``.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import ContextWindowExceededError, LMServerError
from pages import run_section

from sdk import LLM
from sdk.integrations.dspy import lm
from sdk.testing import FakeAnswer, FakeLLM

ANSWER = "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"


class Question(dspy.Signature):  # type: ignore[misc]
    """Answer briefly."""

    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    capital: bool = dspy.OutputField()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(os.environ["CHAT_MODEL"], max_model_len=2048, max_num_seqs=8) as opened:
        yield opened


def test_a_program_gets_its_fields_and_the_tokens_are_counted() -> None:
    with FakeLLM(ANSWER) as fake:
        model = lm(fake, cache=False)
        with dspy.context(lm=model):
            predict = dspy.Predict("question -> answer")
            assert predict(question="Capital of France?").answer == "Paris"
            found = asyncio.run(predict.acall(question="Capital of France?"))
        assert found.answer == "Paris"
        assert model.history[-1]["usage"]["completion_tokens"] == 20


def test_answers_fit_the_types_of_a_signature(llm: LLM) -> None:
    model = lm(llm, cache=False, temperature=0, max_tokens=200)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Question)(question="Which city has the Eiffel Tower?")
    assert isinstance(found.city, str) and isinstance(found.capital, bool)


def test_an_agent_calls_its_tool() -> None:
    steps = [
        '{"next_thought": "look", "next_tool_name": "weather", "next_tool_args": {"city": "Rome"}}',
        '{"next_thought": "done", "next_tool_name": "finish", "next_tool_args": {}}',
        '{"reasoning": "It said so.", "answer": "Sunny"}',
    ]
    asked = []

    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    with FakeLLM(steps) as fake, dspy.context(lm=lm(fake, cache=False), adapter=dspy.JSONAdapter()):
        agent = dspy.ReAct("question -> answer", tools=[weather])
        assert agent(question="Weather in Rome?").answer == "Sunny"
    assert asked == ["Rome"]


def test_native_calls_of_tools_arrive() -> None:
    with FakeLLM([FakeAnswer(tool_calls=[("weather", {"city": "Rome"})])]) as fake:
        model = lm(fake, cache=False)
        tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}}}}  # fmt: skip
        [reply] = model("Weather in Rome?", tools=[tool])
    [call] = reply["tool_calls"]
    assert call["function"]["name"] == "weather"


def test_threads_share_the_steps_of_the_engine(llm: LLM) -> None:
    model = lm(llm, cache=False, temperature=0, max_tokens=24)
    before = llm.get_metrics()["num_steps"]
    replies: list[Any] = [None] * 8

    def ask(number: int) -> None:
        [replies[number]] = model(f"Name a city in country {number}.")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert llm.get_metrics()["num_steps"] - before < 8 * 24 / 2
    assert all(replies) and model("Name a city in country 3.") == [replies[3]]


def test_streams_come_piece_by_piece() -> None:
    with FakeLLM(ANSWER.replace("Paris", "Paris on the river Seine in France")) as fake:
        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        with dspy.context(lm=lm(fake, cache=False)):
            program = dspy.streamify(
                dspy.Predict("question -> answer"), stream_listeners=[listener]
            )

            async def run() -> list[Any]:
                return [piece async for piece in program(question="Where?")]

            *pieces, last = asyncio.run(run())
    assert len(pieces) > 2
    assert "".join(one.chunk for one in pieces).strip() == last.answer


def test_a_prompt_that_is_too_long_is_dspy_s_own_error(llm: LLM) -> None:
    with pytest.raises(ContextWindowExceededError, match="raise max_model_len"):
        lm(llm, cache=False)("word " * 5000)


def test_what_cannot_be_answered_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match=r"expected an open sdk\.LLM, found 'model\.gguf'"):
        lm("model.gguf")  # type: ignore[arg-type]
    with FakeLLM("Yes.") as fake:
        model = lm(fake, cache=False)
    assert model.num_retries == 0
    with pytest.raises(LMServerError, match="this LLM was closed"):
        model("x")


def test_closing_its_engine_ends_its_thread() -> None:
    before = set(threading.enumerate())

    def loops() -> list[threading.Thread]:
        found = set(threading.enumerate()) - before
        return [one for one in found if one.name == "sdk-in-process"]

    with FakeLLM("Yes.") as fake:
        model = lm(fake, cache=False)
        [thread] = loops()
        model.engine.close()
        assert not thread.is_alive()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_section("## DSPy", 1, tmp_path, monkeypatch)
