"""Ollama's API: lines of JSON, its names of options, its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sdk.testing import FakeAnswer
from tests.server.serving import Response, Serve

ASK = [{"role": "user", "content": "How are you?"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def lines(found: Response) -> list[Any]:
    assert found.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in found.body.splitlines()]


def test_a_chat_is_streamed_by_default(serve: Serve) -> None:
    client, _ = serve("one two three")
    *pieces, last = lines(client.post("/api/chat", {"model": "tiny:latest", "messages": ASK}))
    assert "".join(piece["message"]["content"] for piece in pieces) == "one two three"
    assert {piece["done"] for piece in pieces} == {False} and last["done"]
    assert last["done_reason"] == "stop" and last["eval_count"] == 4
    assert last["prompt_eval_count"] > 0 and last["total_duration"] >= last["eval_duration"]
    whole = client.post("/api/chat", {"messages": ASK, "stream": False}).json
    assert whole["message"] == {"role": "assistant", "content": "one two three"}
    assert whole["model"] == "tiny" and whole["created_at"].endswith("Z")


def test_options_have_ollama_s_names(serve: Serve) -> None:
    client, llm = serve()
    options = {"num_predict": 7, "repeat_penalty": 1.2, "top_k": 5, "stop": ["x"], "num_ctx": 99}
    body = {"messages": ASK, "options": options, "format": SCHEMA, "keep_alive": "5m"}
    assert client.post("/api/chat", {**body, "stream": False}).status == 200
    params = llm.requests[0].sampling_params
    assert (params.max_tokens, params.repetition_penalty, params.top_k) == (7, 1.2, 5)
    assert params.stop == ("x",) and params.structure is not None
    assert params.structure.json == SCHEMA
    client.post("/api/chat", {"messages": ASK, "format": "json", "options": {"num_predict": -1}})
    params = llm.requests[1].sampling_params
    assert params.structure is not None and params.structure.json_object
    assert params.max_tokens is None


def test_generate_with_and_without_the_template(serve: Serve) -> None:
    client, llm = serve("one two")
    found = client.post("/api/generate", {"prompt": "hi", "system": "Be brief."})
    assert "".join(piece["response"] for piece in lines(found)) == "one two"
    assert [message["role"] for message in llm.requests[0].prompt] == ["system", "user"]
    found = client.post("/api/generate", {"prompt": "hi", "raw": True, "stream": False})
    assert found.json["response"] == "one two" and found.json["done"]
    assert llm.requests[1].prompt == "hi"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_have_objects_as_arguments(serve: Serve, stream: bool) -> None:
    client, _ = serve(FakeAnswer("Wait.", tool_calls=[("now", {"zone": "UTC"})]))
    found = client.post("/api/chat", {"messages": ASK, "tools": [TOOL], "stream": stream})
    messages = [line["message"] for line in lines(found)] if stream else [found.json["message"]]
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert calls == [{"function": {"name": "now", "arguments": {"zone": "UTC"}}}]
    history = [*ASK, {"role": "assistant", "content": "", "tool_calls": calls}]
    history.append({"role": "tool", "content": "12:00", "tool_name": "now"})
    asked = {"messages": history, "tools": [TOOL], "stream": False}
    assert client.post("/api/chat", asked).status == 200


def test_models_and_version(serve: Serve) -> None:
    client, _ = serve()
    assert [model["name"] for model in client.get("/api/tags").json["models"]] == ["tiny"]
    assert client.get("/api/version").json["version"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": 3, "messages": ASK}, 400, "model: expected a string"),
        ({"messages": []}, 400, "messages: expected"),
        ({"messages": ASK, "options": 3}, 400, "options: expected an object"),
        ({"messages": ASK, "options": {"mirostat": 1}}, 400, "'mirostat' is unknown"),
        ({"messages": ASK, "options": {"temperature": -1}}, 400, "temperature"),
        ({"messages": ASK, "images": ["x"]}, 400, "images: are not supported"),
        ({"messages": [{**ASK[0], "images": ["x"]}]}, 400, "images: are not supported"),
        ({"messages": ASK, "template": "x"}, 400, "template: is not supported"),
        ({"messages": ASK, "frobnicate": 1}, 400, "frobnicate: unknown parameter"),
    ],
)
def test_errors_are_texts(serve: Serve, body: dict[str, Any], status: int, message: str) -> None:
    client, llm = serve()
    found = client.post("/api/chat", body)
    assert found.status == status and list(found.json) == ["error"]
    assert message in found.json["error"] and llm.requests == []


def test_an_error_in_a_stream_is_its_last_line(serve: Serve) -> None:
    client, _ = serve(FakeAnswer("a", error=ValueError("not a number")))
    first, last = lines(client.post("/api/chat", {"messages": ASK}))
    assert first["message"]["content"] == "a" and "not a number" in last["error"]
