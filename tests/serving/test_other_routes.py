"""Responses, embeddings, scores and tokens over HTTP."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from sdk.testing import FakeAnswer
from tests.serving.serving import Serve

TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}}


def test_a_response_has_openai_s_shape(serve: Serve) -> None:
    client, llm = serve("Fine.")
    found = client.post(
        "/v1/responses",
        {
            "model": "tiny",
            "instructions": "Be brief.",
            "input": "How are you?",
            "max_output_tokens": 9,
            "metadata": {"a": "b"},
            "store": True,
        },
    ).json
    assert found["object"] == "response" and found["status"] == "completed"
    [item] = found["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    [part] = item["content"]
    assert part == {"type": "output_text", "text": "Fine.", "annotations": [], "logprobs": []}
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert (found["metadata"], found["max_output_tokens"]) == ({"a": "b"}, 9)
    assert llm.requests[0].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How are you?"},
    ]


def test_items_of_a_conversation_become_messages(serve: Serve) -> None:
    client, llm = serve("Noon.")
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": '{"zone": "UTC"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
        {"type": "function_call_output", "call_id": "c2", "output": "11:00"},
    ]
    asked = {"input": items, "tools": [TOOL], "tool_choice": "auto"}
    found = client.post("/v1/responses", asked)
    assert found.status == 200, found.body
    roles = [message["role"] for message in llm.requests[0].prompt]
    assert roles == ["user", "assistant", "tool", "tool"]
    calls = llm.requests[0].prompt[1]["tool_calls"]
    assert [call["id"] for call in calls] == ["c1", "c2"]
    assert llm.requests[0].prompt[2]["content"] == "12:00"


def test_an_answer_that_is_cut_is_incomplete(serve: Serve) -> None:
    client, _ = serve("one two three")
    found = client.post("/v1/responses", {"input": "hi", "max_output_tokens": 2}).json
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_structured_response(serve: Serve) -> None:
    client, llm = serve('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}}
    assert client.post("/v1/responses", {"input": "hi", "text": text}).status == 200
    structure = llm.requests[0].sampling_params.structure
    assert structure is not None and structure.json == schema


def test_events_of_a_streamed_response_follow_each_other(serve: Serve) -> None:
    client, _ = serve("one two")
    events = client.post("/v1/responses", {"input": "hi", "stream": True}).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    texts = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    [item] = events[-1]["response"]["output"]
    assert "".join(texts) == item["content"][0]["text"] == "one two"
    assert item["id"] == events[2]["item"]["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_of_a_response(serve: Serve, stream: bool) -> None:
    client, _ = serve(FakeAnswer("Wait.", tool_calls=[("now", {"zone": "UTC"}), ("now", {})]))
    found = client.post("/v1/responses", {"input": "hi", "tools": [TOOL], "stream": stream})
    response = found.events[-1]["response"] if stream else found.json
    items = response["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call"]
    calls = [(item["name"], item["arguments"]) for item in items[1:]]
    assert calls == [("now", '{"zone": "UTC"}'), ("now", "{}")]
    assert len({item["call_id"] for item in items[1:]}) == 2
    if stream:
        done = [e for e in found.events if e["type"] == "response.function_call_arguments.done"]
        assert [event["arguments"] for event in done] == [item["arguments"] for item in items[1:]]
        assert [event["output_index"] for event in done] == [1, 2]


def test_an_empty_answer_is_an_empty_message(serve: Serve) -> None:
    client, _ = serve("")
    for stream in (False, True):
        found = client.post("/v1/responses", {"input": "hi", "stream": stream})
        response = found.events[-1]["response"] if stream else found.json
        assert response["output"][0]["content"][0]["text"] == ""


def test_embeddings_as_numbers_and_as_base64(serve: Serve) -> None:
    client, _ = serve()
    found = client.post("/v1/embeddings", {"input": ["a b", "c"], "user": "me"}).json
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    packed = client.post("/v1/embeddings", {"input": "a b", "encoding_format": "base64"}).json
    data = base64.b64decode(packed["data"][0]["embedding"])
    values = struct.unpack(f"<{len(data) // 4}f", data)
    assert values == pytest.approx(found["data"][0]["embedding"], abs=1e-6)
    cut = {"input": "a b c", "truncate_prompt_tokens": 1}
    assert client.post("/v1/embeddings", cut).json["usage"]["prompt_tokens"] == 1


def test_documents_are_ranked(serve: Serve) -> None:
    client, _ = serve()
    asked = {"model": "tiny", "query": "a b", "documents": ["c d", {"text": "a b"}, "a c"]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        found = client.post(path, {**asked, "top_n": 2}).json
        assert [one["index"] for one in found["results"]] == [1, 2]
        assert found["results"][0]["document"] == {"text": "a b"}
        assert found["results"][0]["relevance_score"] == pytest.approx(1)
    plain = client.post("/v1/rerank", {**asked, "return_documents": False}).json
    assert "document" not in plain["results"][0] and len(plain["results"]) == 3
    assert client.post("/v1/rerank", {**asked, "documents": []}).json["results"] == []


def test_texts_are_scored(serve: Serve) -> None:
    client, _ = serve()
    found = client.post("/v1/score", {"text_1": "a", "text_2": ["a", "b"]}).json
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert found["data"][0]["score"] == pytest.approx(1) and found["data"][1]["score"] < 0.9


def test_tokens_of_texts_and_conversations(serve: Serve) -> None:
    client, llm = serve()
    found = client.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json
    assert found["count"] == 2 and found["max_model_len"] == 4096
    assert found["token_strs"] == ["a", " b"]
    assert client.post("/detokenize", {"tokens": found["tokens"]}).json == {"prompt": "a b"}
    messages = [{"role": "user", "content": "a b"}]
    chat = client.post("/tokenize", {"messages": messages}).json["tokens"]
    client.post("/v1/chat/completions", {"messages": messages})
    assert llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True) == chat
    long = "a " * 5000  # is read in a thread
    assert client.post("/tokenize", {"prompt": long}).json["count"] > 4096
