"""Frameworks with openai's clients on a model in this process, with pytest.

``pytest frameworks.py`` with the environment variables ``CHAT_MODEL`` and ``PAGE``.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
from pages import run_section
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from sdk.integrations.openai import async_client, client
from sdk.testing import FakeLLM

ASK: Any = [{"role": "user", "content": "A river?"}]


@pytest.fixture
def llm() -> Iterator[FakeLLM]:
    with FakeLLM("The river Rhine flows north.", seconds_per_token=0.01) as made:
        yield made


@pytest.fixture
def story() -> Iterator[FakeLLM]:
    """Its answer takes longer than :func:`ended` waits."""
    with FakeLLM("It was a dark and stormy night. " * 300, seconds_per_token=0.01) as made:
        yield made


def ended(llm: FakeLLM) -> bool:
    """Whether its requests end within ten seconds."""
    deadline = time.monotonic() + 10
    while llm.get_metrics()["num_running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return not llm.get_metrics()["num_running"]


def loops() -> list[threading.Thread]:
    """Threads with event loops of clients."""
    return [one for one in threading.enumerate() if one.name == "sdk-in-process"]


def test_streams_come_piece_by_piece_and_closing_one_ends_its_request(
    llm: FakeLLM, story: FakeLLM
) -> None:
    own = client({"fake": llm, "story": story})
    assert len(loops()) == 1
    reply = own.chat.completions.create(model="fake", messages=ASK)
    assert isinstance(reply, openai.types.chat.ChatCompletion)
    assert reply.choices[0].message.content == "The river Rhine flows north."
    stream = own.chat.completions.create(model="story", messages=ASK, stream=True)
    first = [next(stream) for _ in range(2)]
    assert first and story.get_metrics()["num_running"] == 1  # the answer goes on meanwhile
    stream.close()
    assert ended(story)
    with pytest.raises(openai.BadRequestError, match="expected a list of messages"):
        own.chat.completions.create(model="fake", messages=[])
    own.close()
    assert not loops()


def test_tasks_run_together_and_a_cancelled_one_ends(llm: FakeLLM) -> None:
    async def run() -> list[Any]:
        own = async_client(llm)
        create = own.chat.completions.create
        replies = await asyncio.gather(*(create(model="fake", messages=ASK) for _ in range(8)))
        task = asyncio.ensure_future(create(model="fake", messages=ASK))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await own.close()
        return replies

    assert len(asyncio.run(run())) == 8
    assert ended(llm)


def test_a_stream_that_nothing_refers_to_ends_its_request(story: FakeLLM) -> None:
    own = client(story)
    gc.disable()  # a stream of openai alone would wait for the collector
    try:
        for _ in own.chat.completions.create(model="fake", messages=ASK, stream=True):
            assert story.get_metrics()["num_running"] == 1
            break
        assert ended(story)
    finally:
        gc.enable()
    own.close()


def test_a_timeout_is_that_of_the_client_and_ends_the_request(llm: FakeLLM) -> None:
    own = client(llm, timeout=0.05)
    with pytest.raises(openai.APITimeoutError):
        own.chat.completions.create(model="fake", messages=ASK)
    assert ended(llm)
    patient = own.with_options(timeout=30)
    assert patient.chat.completions.create(model="fake", messages=ASK).choices
    own.close()


def test_a_stream_and_its_client_that_nothing_refers_to_end_together(story: FakeLLM) -> None:
    for _ in client(story).chat.completions.create(model="fake", messages=ASK, stream=True):
        break
    assert ended(story)


def test_a_stream_of_another_http_client_is_as_openai_makes_it(llm: FakeLLM) -> None:
    own = client(llm)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b"data: [DONE]\n\n")

    other = own.with_options(http_client=httpx.Client(transport=httpx.MockTransport(answer)))
    assert not list(other.chat.completions.create(model="fake", messages=ASK, stream=True))
    own.close()


def test_a_client_that_nothing_refers_to_ends_its_thread(llm: FakeLLM) -> None:
    before = set(threading.enumerate())  # those of other tests may be about to end
    own = client(llm)
    own.models.list()
    [thread] = [one for one in loops() if one not in before]
    del own
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_several_models_answer_by_name(llm: FakeLLM) -> None:
    with FakeLLM("Another.") as other:
        own = client({"one": llm, "two": other})
        reply = own.chat.completions.create(model="two", messages=ASK)
        assert reply.choices[0].message.content == "Another."
        with pytest.raises(openai.NotFoundError, match="three"):
            own.chat.completions.create(model="three", messages=ASK)
        own.close()


def test_an_agent_of_pydantic_ai_calls_its_tool() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    with FakeLLM([call, "Sunny."]) as llm:
        provider = OpenAIProvider(openai_client=async_client(llm))
        agent = Agent(OpenAIChatModel("fake", provider=provider))
        asked: list[str] = []

        @agent.tool_plain
        def weather(city: str) -> str:
            asked.append(city)
            return "21 degrees"

        assert agent.run_sync("Weather in Rome?").output == "Sunny."
        assert asked == ["Rome"]


def test_haystack_generates(llm: FakeLLM) -> None:
    generator = OpenAIChatGenerator(api_key=Secret.from_token("none"), model="fake")
    generator.client = client(llm)
    [reply] = generator.run([ChatMessage.from_user("A river?")])["replies"]
    assert reply.text == "The river Rhine flows north."
    generator.client.close()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_section("## Frameworks with an OpenAI client", 2, tmp_path, monkeypatch)
