"""The server on a real engine with a tiny random model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from sdk import SamplingParams
from sdk.serving import create_app
from tests.serving.serving import Client, running

ASK = [{"role": "user", "content": "How are you?"}]
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
EXACT = {"temperature": 0, "max_tokens": 12}
#: A template that opens the reasoning, as those of reasoning models do.
THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)


@pytest.fixture
def served(tiny_llm: Any) -> Iterator[tuple[Client, Any]]:
    llm = tiny_llm(max_model_len=512, num_threads=1)
    with running(create_app({"tiny": llm})) as client:
        yield client, llm


def test_answers_are_those_of_the_model(served: tuple[Client, Any]) -> None:
    client, llm = served
    params = SamplingParams(temperature=0, max_tokens=12)
    [own] = llm.chat(ASK, params)
    [answer] = own.outputs
    found = client.post(CHAT, {"messages": ASK, **EXACT}).json
    assert found["choices"][0]["message"]["content"] == answer.text
    assert found["usage"]["completion_tokens"] == len(answer.token_ids)
    events = client.post(CHAT, {"messages": ASK, **EXACT, "stream": True}).events[:-1]
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == answer.text
    [text] = llm.generate("Hello", params)
    found = client.post("/v1/completions", {"prompt": "Hello", **EXACT}).json
    assert found["choices"][0]["text"] == text.outputs[0].text


def test_structures_and_tools_are_enforced(served: tuple[Client, Any]) -> None:
    client, _ = served
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    for more in ({"response_format": wanted}, {"guided_json": SCHEMA}):
        found = client.post(CHAT, {"messages": ASK, "max_tokens": 40, **more}).json
        assert set(json.loads(found["choices"][0]["message"]["content"])) >= {"a"}
    asked = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 80}
    for stream in (False, True):
        found = client.post(CHAT, {**asked, "temperature": 0, "stream": stream})
        if stream:
            deltas = [event["choices"][0]["delta"] for event in found.events[:-1]]
            [*calls] = [call for delta in deltas for call in delta.get("tool_calls", [])]
            name, arguments = (
                calls[0]["function"]["name"],
                "".join(call["function"].get("arguments", "") for call in calls),
            )
        else:
            [call] = found.json["choices"][0]["message"]["tool_calls"]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
        assert name == "now" and isinstance(json.loads(arguments), dict)


def test_log_probabilities_are_those_of_the_model(served: tuple[Client, Any]) -> None:
    client, llm = served
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    [own] = llm.generate("Hello there", params)
    asked = {"prompt": "Hello there", "temperature": 0, "max_tokens": 3, "logprobs": 2}
    found = client.post("/v1/completions", {**asked, "echo": True}).json["choices"][0]["logprobs"]
    count = len(own.prompt_token_ids)
    assert len(found["tokens"]) == count + 3 and found["token_logprobs"][0] is None
    expected = [
        row[token].logprob
        for token, row in zip(own.prompt_token_ids[1:], own.prompt_logprobs[1:], strict=True)
    ]
    assert found["token_logprobs"][1:count] == pytest.approx(expected)
    entries = own.outputs[0].logprobs
    expected = [
        row[token].logprob for token, row in zip(own.outputs[0].token_ids, entries, strict=True)
    ]
    assert found["token_logprobs"][count:] == pytest.approx(expected)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart_from_the_answer(tiny_llm: Any, stream: bool) -> None:
    llm = tiny_llm(max_model_len=512, num_threads=1, chat_template=THINKS)
    with running(create_app(llm)) as client:
        found = client.post(CHAT, {"messages": ASK, **EXACT, "ignore_eos": True, "stream": stream})
        if stream:
            deltas = [event["choices"][0]["delta"] for event in found.events[:-1]]
            thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
            content = "".join(delta.get("content", "") for delta in deltas)
        else:
            message = found.json["choices"][0]["message"]
            thought, content = message["reasoning_content"], message["content"] or ""
        assert thought and content == ""  # the mark that ends it was not drawn
        asked = {"input": "How are you?", "max_output_tokens": 12, "stream": stream}
        found = client.post("/v1/responses", {**asked, "ignore_eos": True})
        items = (found.events[-1]["response"] if stream else found.json)["output"]
        assert items[0]["type"] == "reasoning" and items[0]["content"][0]["text"]
        asked = {"messages": ASK, "options": {"num_predict": 12}, "stream": False}
        message = client.post("/api/chat", asked).json["message"]
        assert message["thinking"] and message["content"] == ""


def test_a_context_that_is_full(served: tuple[Client, Any]) -> None:
    client, _ = served
    found = client.post("/v1/completions", {"prompt": "a b " * 600})
    assert found.status == 400 and found.error["code"] == "context_length_exceeded"
    asked = {"prompt": "a b " * 600, "truncate_prompt_tokens": -1, "max_tokens": 4}
    assert client.post("/v1/completions", asked).status == 200


def test_a_sleeping_model_says_so_and_wakes_up(served: tuple[Client, Any]) -> None:
    client, llm = served
    llm.sleep()
    found = client.post(CHAT, {"messages": ASK})
    assert found.status == 503 and found.error["code"] == "model_asleep"
    assert client.get("/ready").status == 503 and client.get("/health").status == 200
    llm.wake_up()
    assert client.post(CHAT, {"messages": ASK, **EXACT}).status == 200


def test_structural_tags_in_both_forms(served: tuple[Client, Any]) -> None:
    client, _ = served
    schema = {"type": "integer", "minimum": 0, "maximum": 9}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<f=add>", "content": content, "end": "</f>"}
    tags = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag], "at_least_one": True}
    newer = {"format": {**tags, "stop_after_first": True}}
    older = {"structures": [{"begin": "<f=", "schema": schema, "end": "</f>"}], "triggers": ["<"]}
    for more in (
        {"response_format": {"type": "structural_tag", **newer}},
        {"structured_outputs": {"structural_tag": json.dumps(newer)}},
    ):
        for path, asked in ((CHAT, {"messages": ASK}), ("/v1/completions", {"prompt": "a"})):
            found = client.post(path, {**asked, "max_tokens": 40, **more}).json["choices"][0]
            text = found["message"]["content"] if path == CHAT else found["text"]
            assert re.fullmatch(r"<f=add>\d</f>", text), text
    body = {"messages": ASK, "response_format": {"type": "structural_tag", **older}}
    assert client.post(CHAT, {**body, "max_tokens": 5}).status == 200
    refused = {"type": "structural_tag", "format": {"type": "dispatch"}}
    found = client.post(CHAT, {"messages": ASK, "response_format": refused})
    assert found.status == 400 and "expected a format of the type" in found.error["message"]


def test_an_answer_that_was_cut_short_says_so(served: tuple[Client, Any]) -> None:
    client, _ = served
    body = {"messages": ASK, "max_tokens": 24, "temperature": 3.0, "seed": 1}
    body["structured_outputs"] = {"json": {"type": "string", "minLength": 18}}
    [choice] = client.post(CHAT, body).json["choices"]
    assert choice["finish_reason"] == "stop" and choice["closed"] is True
    events = client.post(CHAT, {**body, "stream": True}).events[:-1]
    closed = [event["choices"][0].get("closed") for event in events]
    assert closed[-1] is True and not any(closed[:-1])
    body["structured_outputs"] = {"choice": ["yes", "no"]}
    [choice] = client.post(CHAT, body).json["choices"]
    assert "closed" not in choice
