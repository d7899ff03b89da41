"""Anthropic's Messages API: blocks, events, tools, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.serving import create_app
from sdk.testing import FakeAnswer, tiny_model
from tests.serving.serving import Response, Serve, running

ASK = {"model": "any", "max_tokens": 20, "messages": [{"role": "user", "content": "Hi."}]}
TOOL = {
    "name": "now",
    "description": "The time.",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALLS = FakeAnswer("Wait.", tool_calls=[("now", {"zone": "UTC"}), ("now", {})])


def events(found: Response) -> list[dict[str, Any]]:
    """The events; each has its type twice."""
    assert found.headers["content-type"].startswith("text/event-stream")
    made = []
    for part in found.body.decode().strip().split("\n\n"):
        head, data = part.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert head == f"event: {value['type']}"
        made.append(value)
    return made


def test_a_message_has_anthropic_s_shape(serve: Serve) -> None:
    client, llm = serve("Fine, thanks.")
    found = client.post(
        "/v1/messages", {**ASK, "system": "Be brief.", "metadata": {"user_id": "u"}}
    )
    message = found.json
    assert message.pop("id").startswith("msg_") and found.headers["request-id"]
    usage = message.pop("usage")
    assert usage["input_tokens"] > 0 and usage["output_tokens"] == 5
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Fine, thanks."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert llm.requests[0].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
    ]
    again = client.post(
        "/v1/messages", {**ASK, "messages": [{"role": "user", "content": "a " * 99}]}
    )
    more = client.post(
        "/v1/messages", {**ASK, "messages": [{"role": "user", "content": "a " * 99}]}
    )
    cached = more.json["usage"]["cache_read_input_tokens"]
    assert cached > 0
    assert more.json["usage"]["input_tokens"] == again.json["usage"]["input_tokens"] - cached


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "text", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "one two", "max_tokens", None),
        ({"stop_sequences": ["three"]}, "one two ", "stop_sequence", "three"),
        ({"stop_sequences": ["x"]}, "one two three", "end_turn", None),
    ],
)
def test_reasons_to_stop(
    serve: Serve, more: dict[str, Any], text: str, reason: str, sequence: str | None, stream: bool
) -> None:
    client, _ = serve("one two three")
    found = client.post("/v1/messages", {**ASK, **more, "stream": stream})
    if stream:
        pieces = events(found)
        ended = pieces[-2]["delta"]
        deltas = [one["delta"] for one in pieces if one["type"] == "content_block_delta"]
        got = "".join(delta["text"] for delta in deltas)
    else:
        ended, got = found.json, found.json["content"][0]["text"]
    assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, sequence)
    assert got == text


def test_the_model_s_own_stop_strings_end_a_turn(serve: Serve) -> None:
    client, _ = serve("one two three", default_sampling_params=SamplingParams(stop=["three"]))
    found = client.post("/v1/messages", ASK).json
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)


def test_events_follow_each_other(serve: Serve) -> None:
    client, _ = serve("one two")
    found = events(client.post("/v1/messages", {**ASK, "stream": True}))
    assert [one["type"] for one in found] == [
        *("message_start", "ping", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    start, _, opened = found[:3]
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] > 0
    assert opened["content_block"] == {"type": "text", "text": ""} and opened["index"] == 0
    assert found[-2]["usage"]["output_tokens"] == 3
    empty = events(serve("")[0].post("/v1/messages", {**ASK, "stream": True}))
    kinds = [one["type"] for one in empty]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
    assert serve("")[0].post("/v1/messages", ASK).json["content"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(serve: Serve, stream: bool) -> None:
    client, llm = serve(CALLS)
    asked = {**ASK, "tools": [TOOL], "tool_choice": {"type": "any"}, "stream": stream}
    asked["max_tokens"] = 200
    found = client.post("/v1/messages", asked)
    if stream:
        pieces = events(found)
        blocks = [one["content_block"] for one in pieces if one["type"] == "content_block_start"]
        parts: dict[int, str] = {}
        for one in pieces:
            if one["type"] == "content_block_delta" and one["delta"]["type"] == "input_json_delta":
                parts[one["index"]] = parts.get(one["index"], "") + one["delta"]["partial_json"]
        for index, text in parts.items():
            blocks[index]["input"] = json.loads(text)
        ended = pieces[-2]["delta"]["stop_reason"]
        stops = [one["index"] for one in pieces if one["type"] == "content_block_stop"]
        assert stops == list(range(len(blocks)))
    else:
        blocks, ended = found.json["content"], found.json["stop_reason"]
    assert ended == "tool_use"
    calls = [block for block in blocks if block["type"] == "tool_use"]
    assert [(call["name"], call["input"]) for call in calls] == [
        ("now", {"zone": "UTC"}),
        ("now", {}),
    ]
    assert len({call["id"] for call in calls}) == 2
    assert blocks[0]["type"] == "text"
    # what the server wrote comes back, with the results
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "12:00"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1]["id"],
            "content": [{"type": "text", "text": "no zone"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    if stream:
        blocks[0]["text"] = "Wait."
    history = [
        *ASK["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
    ]
    assert client.post("/v1/messages", {**asked, "messages": history}).status == 200
    _, answer, first, second, user = llm.requests[1].prompt
    assert answer["content"] == "Wait." and len(answer["tool_calls"]) == 2
    assert (first["role"], first["content"], first["name"]) == ("tool", "12:00", "now")
    assert first["tool_call_id"] == calls[0]["id"] and second["content"] == "Error: no zone"
    assert user == {"role": "user", "content": "Well?"}


def test_neighbours_of_one_role_are_one_turn_and_a_last_answer_goes_on(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model.gguf")
    seen: list[Any] = []
    with LLM(path) as llm, running(create_app(llm)) as client:
        original = llm.astream

        def astream(prompt: Any, params: Any = None, **more: Any) -> Any:
            seen.append((prompt, more))
            return original(prompt, params, **more)

        llm.astream = astream  # type: ignore[method-assign, assignment]
        turns = [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}]},
            {"role": "assistant", "content": "The answer is ("},
        ]
        asked = {**ASK, "max_tokens": 4, "messages": turns, "output_config": {"effort": "max"}}
        found = client.post("/v1/messages", asked)
        assert found.status == 200, found.body
        counted = client.post("/v1/messages/count_tokens", {"messages": turns}).json
        assert counted == {"input_tokens": found.json["usage"]["input_tokens"]}
        asked = {**ASK, "max_tokens": 4, "thinking": {"type": "disabled"}}
        assert client.post("/v1/messages", asked).status == 200
    prompt, how = seen[0]
    assert prompt == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "The answer is (", "reasoning_content": "t"},
    ]
    assert how["continue_final_message"] is True and how["add_generation_prompt"] is False
    assert how["chat_template_kwargs"] == {"reasoning_effort": "high"}
    assert seen[2][1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_the_schema_of_an_answer_and_choices_of_tools(serve: Serve) -> None:
    client, llm = serve('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    for more in ({"output_config": {"format": form}}, {"output_format": form}):
        assert client.post("/v1/messages", {**ASK, **more}).status == 200
        structure = llm.requests[-1].sampling_params.structure
        assert structure is not None and structure.json == schema
    for choice in ({"type": "none"}, {"type": "tool", "name": "now"}, {"type": "auto"}):
        asked = {
            **ASK,
            "tools": [TOOL],
            "tool_choice": {**choice, "disable_parallel_tool_use": True},
        }
        assert client.post("/v1/messages", asked).status == 200


def test_models_as_anthropic_s_clients_read_them(serve: Serve) -> None:
    client, _ = serve()
    version = {"anthropic-version": "2023-06-01"}
    [card] = (found := client.get("/v1/models", headers=version).json)["data"]
    assert (card["type"], card["id"], card["display_name"]) == ("model", "tiny", "tiny")
    assert found["has_more"] is False and found["first_id"] == found["last_id"] == "tiny"
    assert client.get("/v1/models/tiny", headers=version).json == card


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x.example/y.png"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages: expected a list of messages"),
        ({"messages": ["a"]}, "messages[0]: expected an object"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: expected the role"),
        ({"messages": [{"role": "user", "content": 3}]}, "expected content that is a text or"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images are not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "documents are not supported",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages[0]: expected a block of text, tool_use or thinking",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a"}]}]},
            "tool_use: expected a name and an input",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "tool_use_id: expected a non-empty string",
        ),
        ({"system": 3}, "system: expected content"),
        ({"system": [IMAGE]}, "system: images are not supported"),
        ({"tools": "x"}, "tools: expected a list"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0]: expected a tool"),
        ({"tool_choice": {"type": ["any"]}}, "tool_choice: expected an object"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: expected tools too"),
        ({"thinking": {"type": ["enabled"]}}, "thinking: expected an object with the type"),
        ({"output_config": 3}, "output_config: expected an object"),
        ({"output_config": {"effort": {}}}, "output_config: expected the effort"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config: expected a format"),
        ({"container": "x"}, "container: is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers: is not supported"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"frobnicate": 1}, "frobnicate: unknown parameter"),
    ],
)
def test_bad_requests_have_anthropic_s_errors(
    serve: Serve, change: dict[str, Any], message: str
) -> None:
    client, llm = serve()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        found = client.post(path, {**ASK, **change})
        assert found.status == 400 and list(found.json) == ["type", "error"], found.body
        error = found.json["error"]
        assert found.json["type"] == "error" and error["type"] == "invalid_request_error"
        assert message in error["message"] and found.headers["request-id"]
    assert llm.requests == []


def test_an_error_in_a_stream_is_its_last_event(serve: Serve) -> None:
    client, _ = serve(FakeAnswer("a", error=ValueError("not a number")))
    found = events(client.post("/v1/messages", {**ASK, "stream": True}))
    assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "api_error"
    assert "not a number" in found[-1]["error"]["message"]


def test_a_prompt_is_counted_and_nothing_runs(serve: Serve) -> None:
    client, llm = serve()
    found = client.post("/v1/messages/count_tokens", {"messages": ASK["messages"], "tools": [TOOL]})
    assert found.json["input_tokens"] > 5 and llm.get_metrics()["num_finished"] == 0
    long = {"messages": [{"role": "user", "content": "a " * 9999}]}
    assert "the context holds" in client.post("/v1/messages/count_tokens", long).body.decode()
