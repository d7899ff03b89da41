"""Ollama's API: lines of JSON, its names of options, its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM
from sdk.loaders.open import read_headers
from sdk.serving import create_app
from sdk.serving.model_files import number_text, weight_files
from sdk.testing import FakeAnswer, tiny_model
from tests.serving.serving import Response, Serve, running

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
    for path in ("/api/tags", "/api/ps"):
        assert [model["name"] for model in client.get(path).json["models"]] == ["tiny"]
    assert client.get("/api/version").json["version"]
    shown = client.post("/api/show", {"model": "tiny"}).json
    assert shown["capabilities"] == ["completion", "embedding", "tools"]
    assert "top_p" in shown["parameters"] and shown["model_info"] == {}


def test_sizes_and_formats_are_those_of_the_files(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model.gguf")
    with LLM(path) as llm, running(create_app(llm, model_name=["a", "b"])) as client:
        cards = client.get("/api/tags").json["models"]
        assert [card["name"] for card in cards] == ["a", "b"]
        entries = read_headers(str(path)).entries
        assert cards[0]["size"] == path.stat().st_size
        details = cards[0]["details"]
        parameters = sum(entry.num_elements for entry in entries)
        assert details["parameter_size"] == number_text(parameters)
        assert (details["format"], details["family"]) == ("gguf", "llama")
        assert details["quantization_level"] == "Q4_K_M" and details["families"] == ["llama"]
        [first, _] = client.get("/api/ps").json["models"]
        assert first["size"] == llm.memory_plan.total > 0 and first["size_vram"] == 0
        assert first["context_length"] == llm.max_model_len and first["digest"]
        info = client.post("/api/show", {"name": "a:latest"}).json["model_info"]
        assert info["general.parameter_count"] == parameters
        assert info["llama.embedding_length"] == llm.model_config.hidden_size
        assert info["llama.block_count"] == llm.model_config.num_layers


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1500, "2K"), (134_515_008, "134.52M"), (8_030_000_000, "8.0B")],
)
def test_numbers_of_parameters_are_short(count: int, text: str) -> None:
    assert number_text(count) == text


def test_split_files_and_folders_are_added_up(tmp_path: Path) -> None:
    for name, size in (("a-00001-of-00002.gguf", 3), ("a-00002-of-00002.gguf", 4), ("b.gguf", 9)):
        (tmp_path / name).write_bytes(b"x" * size)
    for name, size in (("x.safetensors", 5), ("config.json", 70)):
        (tmp_path / name).write_bytes(b"x" * size)
    split = weight_files(tmp_path / "a-00001-of-00002.gguf")
    assert sum(path.stat().st_size for path in split) == 7
    assert [path.name for path in weight_files(tmp_path)] == ["x.safetensors"]
    assert weight_files(tmp_path / "gone.gguf") == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", f"/api/{name}") for name in ("pull", "push", "create", "copy")),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:00"),
    ],
)
def test_what_changes_models_is_refused_by_name(serve: Serve, method: str, path: str) -> None:
    client, _ = serve()
    found = client.send(method, path, {"model": "other"})
    assert found.status == 501 and found.json["error"].startswith(f"{path}: is not supported")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"prompt": ""}),
        ("/api/generate", {"keep_alive": 0}),
        ("/api/generate", {"system": "Be brief.", "raw": True}),
        ("/api/chat", {"messages": []}),
        ("/api/chat", {"keep_alive": "-1m"}),
    ],
)
def test_nothing_to_answer_loads(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    client, llm = serve()
    found = client.post(path, {"model": "tiny", "stream": stream, **body})
    [last] = lines(found) if stream else [found.json]
    assert last["done"] is True and last["done_reason"] == "load"
    assert last.get("response", "") == "" and llm.requests == []
    assert client.post(path, {**body, "options": {"top_p": 7}}).status == 400


def test_bodies_need_no_type_where_no_page_sends_them(serve: Serve) -> None:
    """litellm sends none, or aiohttp's, and curl that of a form. A page in a browser cannot leave
    out the origin."""
    client, llm = serve()
    body = json.dumps({"messages": ASK, "stream": False}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for headers in ({}, form, {"Content-Type": "application/octet-stream"}):
        assert client.post("/api/chat", body, headers=headers).status == 200
    assert client.post("/v1/chat/completions", body, headers={}).status == 415
    accepted = len(llm.requests)
    for headers in (
        {"Origin": "https://elsewhere.example"},
        {**form, "Origin": "null"},
        {**form, "Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "text/plain"},
    ):
        found = client.post("/api/chat", body, headers=headers)
        assert found.status == 415 and "application/json" in found.json["error"]
    assert len(llm.requests) == accepted


def test_options_without_effect_are_accepted(serve: Serve) -> None:
    client, llm = serve()
    harmless = ["num_ctx", "num_gpu", "num_batch", "num_thread", "main_gpu", "use_mmap", "numa"]
    options = {**dict.fromkeys(harmless, 1), "mirostat": 0, "mirostat_tau": 5.0, "seed": None}
    more = {"repeat_last_n": 0, "repeat_penalty": 1.5, "tfs_z": 1, "penalize_newline": True}
    body = {"messages": ASK, "options": {**options, **more}, "stream": False}
    assert client.post("/api/chat", body).status == 200
    assert llm.requests[0].sampling_params.repetition_penalty == 1  # over the last 0 tokens
    body["options"] = {"repeat_last_n": -1, "repeat_penalty": 1.5}
    assert client.post("/api/chat", body).status == 200
    assert llm.requests[1].sampling_params.repetition_penalty == 1.5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("raw", [None, True])
def test_log_probabilities(serve: Serve, stream: bool, raw: bool | None) -> None:
    client, _ = serve("one two")
    asked = {"prompt": "hi", "stream": stream, "raw": raw, "logprobs": True, "top_logprobs": 1}
    found = client.post("/api/generate", asked)
    pieces = lines(found)[:-1] if stream else [found.json]
    tokens = [one for piece in pieces for one in piece.get("logprobs", ())]
    assert [one["token"] for one in tokens][:2] == ["one", " two"]
    assert all(one["logprob"] == 0 and len(one["top_logprobs"]) == 1 for one in tokens)
    assert bytes(tokens[1]["bytes"]) == b" two"


def test_thinking_is_apart_and_can_be_switched(tmp_path: Path) -> None:
    """With a chat template that reasons."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content or '' }}{{ m.content }}"
        "{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    path = tiny_model(tmp_path / "model.gguf")
    with LLM(path, chat_template=template) as llm, running(create_app(llm)) as client:
        seen: list[Any] = []
        original = llm.astream

        def astream(prompt: Any, params: Any = None, **more: Any) -> Any:
            seen.append((prompt, more.get("chat_template_kwargs")))
            return original(prompt, params, **more)

        llm.astream = astream  # type: ignore[method-assign, assignment]
        body = {"messages": ASK, "stream": False, "options": {"num_predict": 4}}
        for think in (True, False, "high"):
            assert client.post("/api/chat", {**body, "think": think}).status == 200
        assert client.post("/api/generate", {**body, "prompt": "a", "think": True}).status == 400
        old = {"role": "assistant", "content": "4", "thinking": "2 + 2"}
        asked = {**body, "messages": [*ASK, old, *ASK]}
        assert client.post("/api/chat", asked).status == 200
        assert "thinking" in client.post("/api/show", {"model": "x"}).json["capabilities"]
    assert [variables for _, variables in seen] == [
        {"enable_thinking": True},
        {"enable_thinking": False},
        {"enable_thinking": True, "reasoning_effort": "high"},
        None,
    ]
    assert seen[3][0][1]["reasoning_content"] == "2 + 2"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": 3}, "prompt: expected a string"),
        ({"prompt": "a", "suffix": 3}, "suffix: expected"),
        ({"prompt": "a", "system": 3}, "content"),
        ({"prompt": "a", "context": [1, 2]}, "context: is not supported"),
        ({"prompt": "a", "system": "b", "raw": True}, "system: is not supported with raw"),
        ({"prompt": "a", "raw": True, "top_logprobs": 1}, "top_logprobs: needs logprobs=true"),
        ({"prompt": "a", "images": ["x"]}, "images: are not supported"),
        ({"prompt": "a", "width": 64}, "width: unknown parameter"),
    ],
)
def test_bad_prompts(serve: Serve, body: dict[str, Any], message: str) -> None:
    client, llm = serve()
    found = client.post("/api/generate", body)
    assert found.status == 400 and message in found.json["error"] and llm.requests == []


def test_without_a_chat_template_a_prompt_is_continued(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, llm = serve("one two")
    monkeypatch.setattr(llm._reader, "template_of", lambda options: None)
    asked = {"prompt": "hi", "stream": False}
    assert client.post("/api/generate", asked).json["response"] == "one two"
    assert llm.requests[0].prompt == "hi"
    found = client.post("/api/generate", {**asked, "system": "x"})
    assert found.status == 400 and "without a chat template" in found.json["error"]
    assert client.post("/api/show", {}).json["capabilities"] == ["completion", "embedding"]


def test_embeddings_of_texts(serve: Serve) -> None:
    client, llm = serve(max_model_len=64)
    found = client.post("/api/embed", {"input": ["a b", "c"], "options": {"num_ctx": 9}}).json
    assert found["prompt_eval_count"] == 3 and found["model"] == "tiny"
    assert [sum(x * x for x in vector) for vector in found["embeddings"]] == pytest.approx([1, 1])
    [same] = client.post("/api/embed", {"input": "a b"}).json["embeddings"]
    assert same == found["embeddings"][0]
    older = client.post("/api/embeddings", {"prompt": "a b", "keep_alive": 1.5}).json
    assert older == {"embedding": same}
    long = {"input": "a b " + "c " * 100}
    assert client.post("/api/embed", long).json["prompt_eval_count"] == 64
    assert llm.requests[-1].prompt.startswith("a b c")  # the beginning is kept
    found = client.post("/api/embed", {**long, "truncate": False})
    assert found.status == 400 and "the context holds" in found.json["error"]
    for body in ({"input": ""}, {"input": []}, {}):
        assert client.post("/api/embed", body).json["embeddings"] == []
    assert client.post("/api/embeddings", {"prompt": ""}).json == {"embedding": []}
    for path, body in (("embed", {"input": [3]}), ("embeddings", {"prompt": [3]})):
        found = client.post(f"/api/{path}", body)
        assert found.status == 400 and "expected a" in found.json["error"]


@pytest.mark.parametrize("path", ["/api/nothing", "/api/chat"])
def test_unknown_paths_and_methods_have_ollama_s_errors(serve: Serve, path: str) -> None:
    client, _ = serve()
    found = client.get(path)
    assert found.status in (404, 405) and isinstance(found.json["error"], str)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": 3, "messages": ASK}, 400, "model: expected a string"),
        ({"messages": "hi"}, 400, "messages: expected a list of messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0]: expected content"),
        ({"messages": ASK, "options": 3}, 400, "options: expected an object"),
        ({"messages": ASK, "options": {"mirostat": 1}}, 400, "mirostat: expected 0, found 1"),
        ({"messages": ASK, "options": {"frob": 1}}, 400, "'frob' is unknown"),
        (
            {"messages": ASK, "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
            400,
            "repeat_last_n: expected -1 or 0 beside a penalty, found 64",
        ),
        ({"messages": ASK, "keep_alive": "soon"}, 400, "keep_alive: expected seconds"),
        ({"messages": ASK, "think": "much"}, 400, "think: expected true"),
        ({"messages": ASK, "think": True}, 400, "tiny does not support thinking"),
        ({"messages": ASK, "top_logprobs": 2}, 400, "top_logprobs: needs logprobs=true"),
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
