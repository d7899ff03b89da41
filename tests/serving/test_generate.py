"""Chat and text completions over HTTP: shapes, streams, parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sdk import SamplingParams
from sdk.testing import FakeAnswer, FakeLLM
from tests.serving.serving import Serve

ASK = [{"role": "user", "content": "How are you?"}]
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_a_chat_completion_has_openai_s_shape(serve: Serve) -> None:
    client, _ = serve()
    found = client.post(CHAT, {"model": "tiny", "messages": ASK})
    assert found.status == 200 and found.headers["content-type"] == "application/json"
    value = found.json
    assert value.pop("id").startswith("chatcmpl-") and value.pop("created") > 0
    assert value == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Fine, thanks.", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_streamed_chat_adds_up_and_ends_with_usage_and_done(serve: Serve) -> None:
    client, _ = serve("one two three")
    asked = {"messages": ASK, "stream": True, "stream_options": {"include_usage": True}}
    found = client.post(CHAT, asked)
    assert found.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = found.events
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta["content"] for delta in deltas) == "one two three"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [*[None] * (len(chunks) - 1), "stop"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert all("usage" not in chunk for chunk in chunks)


def test_every_chunk_has_the_usage_if_asked_for(serve: Serve) -> None:
    client, _ = serve("one two three")
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in ((CHAT, {"messages": ASK}), ("/v1/completions", {"prompt": "x"})):
        found = client.post(path, {**asked, "stream": True, "stream_options": options}).events
        counts = [chunk["usage"]["completion_tokens"] for chunk in found[:-1]]
        assert counts == [1, 2, 3, 4, 4]


def test_quickly_made_chunks_equal_those_of_the_responses(serve: Serve) -> None:
    """Chunks with nothing but text are made from constant parts: with logprobs they are not."""
    client, _ = serve('one "two" \\ tri\u00e9 \u2603 \U0001f600')
    for path, asked, more in (
        (CHAT, {"messages": ASK}, {"logprobs": True}),
        ("/v1/completions", {"prompt": "x"}, {"logprobs": 0}),
    ):
        quick, slow = (
            client.post(path, {**asked, **extra, "stream": True}).events for extra in ({}, more)
        )
        assert len(quick) == len(slow)
        for one, other in zip(quick[:-1], slow[:-1], strict=True):
            for value in (one, other):
                value["id"] = value["created"] = None
            other["choices"][0]["logprobs"] = None
            assert one == other


def test_parameters_of_openai_and_vllm_reach_the_model(serve: Serve) -> None:
    client, llm = serve(default_sampling_params=SamplingParams(top_k=7, temperature=0.3))
    found = client.post(
        CHAT,
        {
            "model": "tiny",
            "messages": ASK,
            "top_p": 0.5,
            "n": 2,
            "stop": ["x"],
            "seed": 3,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "max_completion_tokens": 9,
            "logit_bias": {"5": -100},
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "temperature": None,
            # what clients send and nothing here depends on
            "user": "me",
            "store": False,
            "metadata": {"a": "b"},
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "modalities": ["text"],
            "verbosity": "medium",
            "reasoning_effort": "low",
        },
    )
    assert found.status == 200, found.body
    assert [choice["index"] for choice in found.json["choices"]] == [0, 1]
    params = llm.requests[0].sampling_params
    assert (params.top_k, params.temperature, params.top_p, params.n) == (7, 0.3, 0.5, 2)
    assert (params.stop, params.seed, params.max_tokens) == (("x",), 3, 9)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.min_p, params.repetition_penalty, params.min_tokens) == (0.1, 1.1, 1)
    assert dict(params.logit_bias or {}) == {5: -100}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_structures_under_every_name(serve: Serve, body: dict[str, Any], expected: Any) -> None:
    client, llm = serve('{"a": 1}')
    assert client.post(CHAT, {"messages": ASK, **body}).status == 200
    structure = llm.requests[0].sampling_params.structure
    assert (None if structure is None else structure.json) == expected


def test_guided_choices_regexes_and_grammars(serve: Serve) -> None:
    client, llm = serve("yes")
    for name, value in (("choice", ["yes", "no"]), ("regex", "y.*"), ("grammar", 'start: "y"')):
        assert client.post(CHAT, {"messages": ASK, f"guided_{name}": value}).status == 200
        found = llm.requests[-1].sampling_params.structure
        assert found is not None and list(getattr(found, name)) == list(value)


def test_log_probabilities(serve: Serve) -> None:
    client, _ = serve("one two")
    asked = {"messages": ASK, "logprobs": True, "top_logprobs": 1}
    [choice] = client.post(CHAT, asked).json["choices"]
    first, *_ = choice["logprobs"]["content"]
    assert first["token"] == "one" and first["bytes"] == list(b"one") and first["logprob"] == 0
    assert [one["token"] for one in first["top_logprobs"]] == ["one"]
    [choice] = client.post("/v1/completions", {"prompt": "a b", "logprobs": 1}).json["choices"]
    found = choice["logprobs"]
    assert found["tokens"][:2] == ["one", " two"] and found["text_offset"][:2] == [3, 6]
    assert found["top_logprobs"][0] == {"one": 0.0}


def test_echo_scores_the_prompt(serve: Serve) -> None:
    client, _ = serve("one two")
    asked = {"prompt": "a b", "echo": True, "logprobs": 0, "max_tokens": 0}
    for stream in (False, True):
        found = client.post("/v1/completions", {**asked, "stream": stream})
        choice = (found.events[0] if stream else found.json)["choices"][0]
        assert choice["text"] == "a b" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == ["a", " b"]
        assert choice["logprobs"]["token_logprobs"] == [None, 0.0]
        assert choice["logprobs"]["text_offset"] == [0, 1]
    assert client.post("/v1/completions", asked).json["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_answers_have_their_indexes(serve: Serve, stream: bool) -> None:
    client, _ = serve(lambda prompt: f"to {prompt}")
    options = {"include_usage": True} if stream else None
    asked = {"prompt": ["a", "b"], "n": 2, "stream": stream, "stream_options": options}
    found = client.post("/v1/completions", asked)
    texts: dict[int, str] = {}
    chunks = found.events[:-1] if stream else [found.json]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert dict(sorted(texts.items())) == {0: "to a", 1: "to a", 2: "to b", 3: "to b"}
    assert chunks[-1]["usage"]["prompt_tokens"] == 2
    assert chunks[-1]["usage"]["completion_tokens"] == 12


def test_prompts_may_be_token_ids(serve: Serve) -> None:
    client, llm = serve()
    ids = client.post("/tokenize", {"prompt": "a b"}).json["tokens"]
    for prompt in (ids, [ids]):
        assert client.post("/v1/completions", {"prompt": prompt}).status == 200
        assert llm.requests[-1].prompt == "a b"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(serve: Serve, stream: bool) -> None:
    client, _ = serve(FakeAnswer("Wait.", tool_calls=[("now", {"zone": "UTC"}), ("now", {})]))
    asked = {"messages": ASK, "tools": [TOOL], "tool_choice": "auto", "stream": stream}
    found = client.post(CHAT, asked)
    if not stream:
        [choice] = found.json["choices"]
        assert choice["message"]["content"].strip() == "Wait."
        calls = [one["function"] for one in choice["message"]["tool_calls"]]
        assert all(
            one["id"] and one["type"] == "function" for one in choice["message"]["tool_calls"]
        )
        reason = choice["finish_reason"]
    else:
        calls = []
        choices = [choice for chunk in found.events[:-1] for choice in chunk["choices"]]
        for choice in choices:
            for one in choice["delta"].get("tool_calls", []):
                if one["index"] == len(calls):
                    calls.append({"name": one["function"]["name"], "arguments": ""})
                calls[one["index"]]["arguments"] += one["function"].get("arguments", "")
        reason = choices[-1]["finish_reason"]
    assert reason == "tool_calls"
    assert calls == [
        {"name": "now", "arguments": '{"zone": "UTC"}'},
        {"name": "now", "arguments": "{}"},
    ]


def test_the_name_of_the_only_model_may_be_left_out(serve: Serve) -> None:
    client, _ = serve()
    assert client.post(CHAT, {"messages": ASK}).json["model"] == "tiny"


def test_a_salt_keeps_conversations_apart(serve: Serve) -> None:
    """With the same salt the prefix is found, with another it is not; and without is one more."""
    client, _ = serve()
    asked = {"messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 1}

    def cached(salt: str | None) -> int:
        found = client.post(CHAT, {**asked, "cache_salt": salt}).json["usage"]
        return int(found["prompt_tokens_details"]["cached_tokens"])

    assert [cached(salt) > 0 for salt in ("a", "b", None)] == [False, False, False]
    assert [cached(salt) > 0 for salt in ("a", "b", None)] == [True, True, True]
    assert "cache_salt" in client.post(CHAT, {**asked, "cache_salt": ""}).error["message"]


def test_requests_ids_are_returned(serve: Serve) -> None:
    client, _ = serve()
    given = {"X-Request-Id": "mine-1"}
    assert client.get("/v1/models", headers=given).headers["x-request-id"] == "mine-1"
    for wrong in ("a b", "x" * 200, "\u00e4"):
        made = client.get("/v1/models", headers={"X-Request-Id": wrong}).headers["x-request-id"]
        assert made != wrong and len(made) == 32


def test_a_reasoning_model_s_thoughts_are_apart() -> None:
    """Of a template that knows reasoning; the fake model's does not."""
    from sdk.serving.models import Served

    with FakeLLM() as llm:
        assert Served("tiny", llm).reasons is False


def test_one_wakeup_serves_all_streams_of_a_step(serve: Serve) -> None:
    """Answers of different lengths, interleaved, arrive whole."""
    client, _ = serve(lambda prompt: "word " * int(prompt), max_num_seqs=32)
    asked = {"prompt": [str(number) for number in range(1, 33)], "stream": True}
    texts = dict.fromkeys(range(32), "")
    for chunk in client.post("/v1/completions", asked).events[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {number: "word " * (number + 1) for number in range(32)}


def test_bodies_may_be_any_json(serve: Serve) -> None:
    client, llm = serve()
    body = json.dumps({"prompt": "caf\u00e9 \U0001f600"}, ensure_ascii=False).encode()
    kind = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post("/v1/completions", body, headers=kind).status == 200
    assert llm.requests[0].prompt == "caf\u00e9 \U0001f600"
