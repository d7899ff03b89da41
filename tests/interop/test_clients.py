"""Clients of OpenAI's API that nobody here wrote, unmodified, against the server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.server import create_app
from tests.interop.conftest import HERE, surroundings
from tests.server.serving import running

ASK = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
CITIES = ("Paris", "Rome")


@pytest.fixture(scope="module")
def found(
    python: Callable[[str], Path],
    smollm2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What each program of drivers/openai_clients.py found, and our own answer under ""."""
    with LLM(smollm2, memory="1GiB", max_model_len=4096) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        [own] = llm.chat(ASK, params)
        with running(create_app({"smol": llm})) as client:
            program = HERE / "drivers" / "openai_clients.py"
            address = f"http://127.0.0.1:{client.port}/v1"
            done = subprocess.run(
                [str(python("clients")), str(program), address, "smol"],
                cwd=tmp_path_factory.mktemp("clients"),
                env=surroundings(),
                capture_output=True,
                text=True,
            )
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "": own}


def of(found: dict[str, Any], name: str) -> Any:
    """What a program found. The test fails with its traceback if it raised."""
    assert "error" not in found[name], found[name]["error"]
    return found[name]["found"]


def test_openai_gets_the_answer_of_the_model(found: dict[str, Any]) -> None:
    [answer] = found[""].outputs
    expected = [answer.text, len(answer.token_ids)]
    assert of(found, "sync") == expected
    assert of(found, "stream") == expected
    assert of(found, "asynchronous") == [answer.text, 2, answer.text]


@pytest.mark.parametrize("name", ["tools", "streamed_tools"])
def test_openai_gets_tool_calls(found: dict[str, Any], name: str) -> None:
    called, arguments, *rest = of(found, name)
    assert called == "weather" and arguments["city"] in CITIES and all(rest)


def test_openai_gets_structures_log_probabilities_and_embeddings(found: dict[str, Any]) -> None:
    assert of(found, "parse")["name"] in CITIES
    count, tops = of(found, "logprobs")
    assert count == 4 and all(top >= 3 for top in tops)
    assert [text[:5] for text in of(found, "completions")] == ["One, ", "a b c"]
    assert of(found, "embeddings") == [2, 1.0]


def test_openai_s_responses(found: dict[str, Any]) -> None:
    whole, streamed, parsed = of(found, "responses")
    assert whole and streamed and parsed["name"] in CITIES


def test_openai_raises_its_own_errors(found: dict[str, Any]) -> None:
    kinds, models = of(found, "errors")
    assert kinds == [
        ["NotFoundError", "model"],
        ["BadRequestError", "temperature"],
        ["BadRequestError", "messages"],
    ]
    assert models == ["smol"]


def test_litellm(found: dict[str, Any]) -> None:
    assert of(found, "with_litellm") == [True, "weather", "too long"]


def test_langchain(found: dict[str, Any]) -> None:
    same, called, city, raw, vectors = of(found, "with_langchain")
    assert same and raw and called == "weather" and city["name"] in CITIES and vectors == 2


def test_instructor(found: dict[str, Any]) -> None:
    assert [city["name"] in CITIES for city in of(found, "with_instructor")] == [True, True]
