"""Clients that nobody here wrote, unmodified, against the server: of OpenAI's API, Ollama's and
Anthropic's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.serving import create_app
from tests.interop.conftest import HERE, MADE, surroundings
from tests.serving.serving import running

ASK = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
CITIES = ("Paris", "Rome")
#: By driver and environment.
PROGRAMS = {
    ("openai_clients", "clients"): (
        *("sync", "stream", "asynchronous", "tools", "streamed_tools", "parse", "logprobs"),
        *("completions", "responses", "embeddings", "errors", "with_litellm", "with_langchain"),
    ),
    ("openai_clients", "instructor"): ("with_instructor",),
    ("other_clients", "clients"): (
        *("ollama_client", "litellm_ollama", "litellm_ollama_chat", "litellm_openai"),
        *("litellm_anthropic", "anthropic_client", "anthropic_tools"),
    ),
}
#: ollama-python's examples that end by themselves and need neither images nor a model that thinks.
EXAMPLES = (
    *("chat", "chat-stream", "chat-logprobs", "async-chat", "generate", "generate-stream"),
    *("generate-logprobs", "async-generate", "embed", "list", "show", "tools", "async-tools"),
    "structured-outputs",
)


@pytest.fixture(scope="module")
def found(
    python: Callable[[str], Path],
    smollm2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What each program of the drivers found, and our own answer under ""."""
    with LLM(smollm2, memory="1GiB", max_model_len=4096) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        [own] = llm.chat(ASK, params)
        with running(create_app({"smol": llm})) as client:
            results = {"": own}
            for (driver, environment), programs in PROGRAMS.items():
                program = str(HERE / "drivers" / f"{driver}.py")
                address = f"http://127.0.0.1:{client.port}"
                address += "/v1" if driver == "openai_clients" else ""
                done = subprocess.run(
                    [str(python(environment)), program, address, "smol", *programs],
                    cwd=tmp_path_factory.mktemp("clients"),
                    env=surroundings(),
                    capture_output=True,
                    text=True,
                )
                assert done.returncode == 0, done.stderr[-3000:]
                results |= json.loads(done.stdout.splitlines()[-1])
    return results


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


def test_ollama_s_client(found: dict[str, Any]) -> None:
    got, [answer] = of(found, "ollama_client"), found[""].outputs
    assert got["text"] == got["streamed"] == answer.text
    assert (got["load"], got["context"], got["family"]) == ("load", 4096, "llama")
    assert got["city"] in CITIES and got["vectors"] == 2
    assert got["refused"][0] == 501 and "/api/pull: is not supported" in got["refused"][1]


@pytest.mark.parametrize("prefix", ["ollama", "ollama_chat", "openai", "anthropic"])
def test_litellm_speaks_every_api(found: dict[str, Any], prefix: str) -> None:
    [answer] = found[""].outputs
    assert of(found, f"litellm_{prefix}")[:3] == [answer.text] * 3


def test_anthropic_s_client(found: dict[str, Any]) -> None:
    got, [answer] = of(found, "anthropic_client"), found[""].outputs
    assert got["text"] == got["streamed"] == answer.text and got["same"] and got["counted"]
    assert got["reason"] == ["end_turn", "end_turn"]
    assert got["tokens"] == [len(answer.token_ids)] * 2
    assert got["stopped"] == ["stop_sequence", "France"] and got["models"] == ["smol"]
    assert got["kinds"] == ["message_start", "message_delta", "message_stop"]
    assert "images are not supported" in got["refused"]


def test_tools_of_anthropic_s_client(found: dict[str, Any]) -> None:
    got = of(found, "anthropic_tools")
    assert got["reason"] == "tool_use" and got["answer"] == "text"
    assert all(city in CITIES for city in (*got["cities"], got["parsed"]))


def test_ollama_s_examples_run(
    python: Callable[[str], Path], smollm2: Path, tmp_path: Path
) -> None:
    """As they are published; the model answers to the names that they use."""
    folder = MADE / "ollama-examples"
    assert folder.is_dir(), f"{folder} is missing: run `make test-interop`"
    with (
        LLM(smollm2, memory="1GiB", max_model_len=512) as llm,
        running(create_app(llm)) as client,
    ):
        variables = {**surroundings(), "OLLAMA_HOST": f"http://127.0.0.1:{client.port}"}
        for name in (*EXAMPLES, "pull", "create"):
            done = subprocess.run(
                [str(python("clients")), str(folder / f"{name}.py")],
                cwd=tmp_path,
                env=variables,
                capture_output=True,
                text=True,
            )
            if name in ("pull", "create"):
                assert f"/api/{name}: is not supported" in done.stderr
            else:
                assert done.returncode == 0 and done.stdout, (name, done.stderr[-2000:])
