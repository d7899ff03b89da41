"""The ``llm`` command and its Python interface with our plugin, with pytest.

``pytest llm_plugin.py`` with the environment variables ``CHAT_MODEL`` and ``EMBEDDING_MODEL``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import llm
import pytest

from sdk.integrations.llm import AsyncChat, Chat
from sdk.testing import FakeAnswer, FakeLLM

MODEL, VECTORS = os.environ["CHAT_MODEL"], os.environ["EMBEDDING_MODEL"]
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "24")


@pytest.fixture
def command(tmp_path: Path) -> Any:
    """``command(*arguments)``: what ``llm`` prints, with a folder of settings of its own."""

    def run(*arguments: str, fails: bool = False) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("llm")), *arguments],
            env={**os.environ, "LLM_USER_PATH": str(tmp_path / "settings")},
            capture_output=True,
            text=True,
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    return run


def scripted(script: Any) -> tuple[Chat, FakeLLM]:
    """A model with scripted answers."""
    fake = FakeLLM(script)
    chat = Chat("fake")
    chat.engine._llm = fake
    return chat, fake


def test_a_path_is_a_model_and_a_conversation_goes_on(command: Any) -> None:
    first = command("-m", f"embedlm/{MODEL}", "Name a river.", *GREEDY)
    assert first.strip()
    assert command(f"--model=embedlm/{MODEL}", "Name a river.", *GREEDY) == first
    assert command("-m", f"embedlm/{MODEL}", "-c", "Where is it?", *GREEDY).strip()
    [last, *_] = json.loads(command("logs", "--json", "-n", "1"))
    assert last["model"] == f"embedlm/{MODEL}"
    assert last["input_tokens"] > 60 > last["output_tokens"] > 0  # the first turn is in the prompt


def test_a_noted_model_has_a_name_until_it_is_removed(command: Any) -> None:
    assert command("embedlm", "add", MODEL, "--name", "small") == "llm -m embedlm/small\n"
    assert "embedlm/small" in command("models")
    assert command("-m", "embedlm/small", "Hi", *GREEDY).strip()
    assert command("-c", "Go on", *GREEDY).strip()  # the log has the name
    command("embedlm", "remove", "small")
    assert "embedlm/small" not in command("models")
    assert "is not noted; there are: none" in command("embedlm", "remove", "small", fails=True)


def test_an_answer_fits_the_schema_and_has_no_other_keys(command: Any) -> None:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "200")
    shown = command("-m", f"embedlm/{MODEL}", "--schema", "name, age int", "Invent one", *options)
    assert set(json.loads(shown)) == {"name", "age"}


def test_texts_are_embedded(command: Any) -> None:
    command("embedlm", "add", VECTORS, "--name", "vectors", "--embedding")
    noted = json.loads(command("embed", "-m", "embedlm/vectors", "-c", "A river"))
    named = json.loads(command("embed", "-m", f"embedlm/{VECTORS}", "-c", "A river"))
    assert noted == named and abs(sum(x * x for x in noted) - 1) < 1e-5


def test_what_cannot_be_opened_or_asked_is_one_line(command: Any, tmp_path: Path) -> None:
    assert command("-m", "embedlm/no.gguf", "Hi", fails=True).startswith("Error: no.gguf: no such")
    model = f"embedlm/{MODEL}"
    assert "temperature" in command("-m", model, "Hi", "-o", "temperature", "-1", fails=True)
    picture = tmp_path / "dot.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(16))
    told = command("-m", model, "Hi", "--at", str(picture), "image/png", fails=True)
    assert told.count("\n") == 1 and "images" in told
    assert command("-m", model, "", fails=True) == "Error: the prompt is empty\n"
    told = command("embed", "-m", "embedlm/nowhere", "-c", "x", fails=True)
    assert told == "Error: nowhere: no such file or folder\n"
    told = command("embedlm", "add", "/nowhere.gguf", "--name", "x", fails=True)
    assert told == "Error: /nowhere.gguf: no such file or folder\n"
    assert command("embedlm", "add", "owner/name-GGUF:Q4_K_M", "--name", "hub")  # only its form
    (tmp_path / "settings" / "embedlm.json").write_text("[")
    assert "delete it and add" in command("models", fails=True)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}"


def test_tools_are_called_and_the_model_reads_their_results() -> None:
    chat, fake = scripted([FakeAnswer(tool_calls=[("weather", {"city": "Rome"})]), "It is sunny."])
    chain = chat.chain("Weather in Rome?", tools=[weather])
    assert chain.text() == "It is sunny."
    said = [(one["role"], one["content"]) for one in fake.requests[1].prompt]
    assert said == [("user", "Weather in Rome?"), ("assistant", ""), ("tool", "Sunny in Rome")]


def test_pieces_arrive_as_they_are_written_and_usage_is_counted() -> None:
    chat, _ = scripted("The river Rhine flows north.")
    response = chat.prompt("A river?")
    assert len(list(response)) > 3 and response.text() == "The river Rhine flows north."
    assert response.usage().output == 7
    other = AsyncChat("fake", engine=chat.engine)

    async def together() -> list[str]:
        async def one() -> str:
            return str(await other.prompt("A river?").text())

        return await asyncio.gather(*(one() for _ in range(4)))

    assert asyncio.run(together()) == ["The river Rhine flows north."] * 4


def test_leaving_a_stream_ends_its_request() -> None:
    with FakeLLM("word " * 500, seconds_per_token=0.01) as fake:
        chat = Chat("fake")
        chat.engine._llm = fake
        pieces = iter(chat.prompt("Go."))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 10
        while fake.get_metrics()["num_running"]:  # it ends with the step that runs
            assert time.monotonic() < deadline


def test_options_of_the_engine_hold_from_the_first_prompt_on() -> None:
    chat, _ = scripted("Yes.")
    with pytest.raises(llm.ModelError, match="memory: applies to the first prompt"):
        chat.prompt("Hi", memory="1GiB").text()
    chat.close()
    assert chat.engine._llm is None
