"""Every error has OpenAI's shape, the right status, and a message that says what to do."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from sdk import EngineDeadError, RequestError
from sdk.api.errors import OutOfMemoryError, SdkError
from sdk.serving import Caller, Demand, Open, Refused, create_app
from sdk.serving.access import Admission, Client as Peer, Headers, Outcome
from sdk.serving.errors import error_response
from sdk.testing import FakeAnswer, FakeLLM
from tests.serving.serving import Serve, eventually, running

ASK = [{"role": "user", "content": "How are you?"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, {}, "messages", "expected a list of messages, found None"),
        (CHAT, {"messages": []}, "messages", "expected a list of messages"),
        (CHAT, {"messages": "hi"}, "messages", "expected a list of messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "expected content"),
        (CHAT, {"messages": ASK, "temperature": -1}, "temperature", "in [0"),
        (CHAT, {"messages": ASK, "temperature": "hot"}, "temperature", "must be"),
        (CHAT, {"messages": ASK, "n": 1000}, "n", "in [1, 64]"),
        (CHAT, {"messages": ASK, "max_tokens": 0}, "max_tokens", "in [1"),
        (CHAT, {"messages": ASK, "temprature": 1}, "temprature", "did you mean temperature?"),
        (CHAT, {"messages": ASK, "frobnicate": 1}, "frobnicate", "unknown parameter"),
        (CHAT, {"messages": ASK, "functions": [{}]}, "functions", "use tools"),
        (CHAT, {"messages": ASK, "audio": {}}, "audio", "is not supported"),
        (CHAT, {"messages": ASK, "modalities": ["audio"]}, "modalities", "is not supported"),
        (CHAT, {"messages": ASK, "chat_template": "x"}, "chat_template", "the owner of the model"),
        (CHAT, {"messages": ASK, "tool_choice": "auto"}, "tool_choice", "expected tools too"),
        (CHAT, {"messages": ASK, "tools": [{"type": "x"}]}, "tools", "x"),
        (CHAT, {"messages": ASK, "stream": "yes"}, "stream", "expected true or false"),
        (CHAT, {"messages": ASK, "stream_options": 3}, "stream_options", "expected an object"),
        (CHAT, {"messages": ASK, "top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        (CHAT, {"messages": ASK, "logprobs": 2}, "logprobs", "expected true or false"),
        (CHAT, {"messages": ASK, "response_format": {"type": "xml"}}, "response_format", "xml"),
        (CHAT, {"messages": ASK, "guided_json": {}, "guided_regex": "x"}, "guided_json", "one"),
        (CHAT, {"messages": ASK, "output_kind": "DELTA"}, "output_kind", "unknown parameter"),
        (CHAT, {"messages": ASK, "tenant": "other"}, "tenant", "unknown parameter"),
        (CHAT, {"messages": ASK, "model": 3}, "model", "expected a string"),
        (TEXT, {}, "prompt", "expected a text"),
        (TEXT, {"prompt": []}, "prompt", "expected a text"),
        (TEXT, {"prompt": [{}]}, "prompt", "expected texts"),
        (TEXT, {"prompt": [-1]}, "prompt_token_ids", "expected ids in 0.."),
        (TEXT, {"prompt": ["a", 3]}, "prompt", "expected texts"),
        (TEXT, {"prompt": "a", "suffix": "b", "echo": True}, "suffix", "cannot be combined"),
        (TEXT, {"prompt": "a", "add_special_tokens": False}, "add_special_tokens", "token ids"),
        ("/v1/embeddings", {}, "input", "expected a text"),
        ("/v1/embeddings", {"input": "a", "dimensions": 4}, "dimensions", "is not supported"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "x"}, "encoding_format", "base64"),
        ("/v1/embeddings", {"input": "a", "stop": "x"}, "stop", "unknown parameter"),
        ("/v1/rerank", {"query": "a"}, "documents", "expected a list of texts"),
        ("/v1/rerank", {"query": 3, "documents": ["a"]}, "query", "expected a string"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents", "expected a text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "positive"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "score", "expected one"),
        ("/tokenize", {}, "prompt", "expected a string"),
        ("/detokenize", {"tokens": ["x"]}, "tokens", "expected a list of integers"),
        ("/detokenize", {"tokens": [10**9]}, "tokens", "expected a list of integers"),
        ("/v1/responses", {}, "input", "expected a text or a list of items"),
        ("/v1/responses", {"input": [{"type": "image"}]}, "input", "expected the type message"),
        (
            "/v1/responses",
            {"input": "a", "previous_response_id": "x"},
            "previous_response_id",
            "Response 'x' is not kept: the newest responses are kept, 64.0 MiB",
        ),
        (
            "/v1/responses",
            {"input": "a", "previous_response_id": 3},
            "previous_response_id",
            "expected a string, found 3",
        ),
        ("/v1/responses", {"input": "a", "store": 1}, "store", "expected true or false"),
        ("/v1/responses", {"input": "a", "conversation": "x"}, "conversation", "is not supported"),
        ("/v1/responses", {"input": "a", "background": True}, "background", "is not supported"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools", "function"),
    ],
)
def test_a_bad_parameter_is_named(
    serve: Serve, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    client, llm = serve()
    found = client.post(path, body)
    assert found.status == 400, found.body
    assert found.error["type"] == "invalid_request_error"
    assert found.error["param"] == param and message in found.error["message"]
    assert llm.requests == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"\xff\xfe{}", 400, "invalid_json"),
        (b'{"a": NaN}', 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
        (b"[]", 400, None),
        (b'"text"', 400, None),
        (b" " * 3000, 413, "request_too_large"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_body_that_is_no_json_object(
    serve: Serve, body: bytes, status: int, code: str | None
) -> None:
    limit = 2000 if status == 413 else 10**6
    client, _ = serve(app={"max_body_bytes": limit})
    found = client.post(CHAT, body, headers={"Content-Type": "application/json"})
    assert (found.status, found.error["code"]) == (status, code)


def test_a_chunked_body_is_limited_too(serve: Serve) -> None:
    client, _ = serve(app={"max_body_bytes": 100})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as raw:
        raw.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        raw.sendall(b"40\r\n" + b" " * 64 + b"\r\n" + b"40\r\n" + b" " * 64 + b"\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


def test_only_json_is_read(serve: Serve) -> None:
    """A page in a browser can send other types to this machine without asking first."""
    client, llm = serve()
    body = json.dumps({"messages": ASK}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        found = client.post(CHAT, body, headers={"Content-Type": kind})
        assert found.status == 415 and "application/json" in found.error["message"]
    assert llm.requests == []


def test_several_models_must_be_named() -> None:
    with FakeLLM("x") as a, FakeLLM("y") as b, running(create_app({"a": a, "b": b})) as client:
        found = client.post(CHAT, {"model": "gpt-4", "messages": ASK})
        assert found.status == 404
        assert found.error["code"] == "model_not_found" and found.error["param"] == "model"
        assert "expected one of a, b, found 'gpt-4'" in found.error["message"]


def test_unknown_models_paths_and_methods(serve: Serve) -> None:
    client, _ = serve()
    assert client.get("/v1/models/gpt-4").error["code"] == "model_not_found"
    assert client.get("/v1/models/tiny").json["id"] == "tiny"
    found = client.get("/v1/nothing")
    assert found.status == 404 and found.error["code"] == "unknown_url"
    found = client.get(CHAT)
    assert found.status == 405 and found.headers["allow"] == "POST"
    assert found.error["code"] == "method_not_allowed"


def test_a_prompt_that_is_too_long_has_openai_s_code(serve: Serve) -> None:
    client, _ = serve(max_model_len=64)
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "word " * 100}]}),
        (TEXT, {"prompt": "word " * 100}),
    ):
        found = client.post(path, body)
        assert found.status == 400 and found.error["code"] == "context_length_exceeded"
        assert "this model's maximum context length is" in found.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_while_it_runs(serve: Serve, stream: bool) -> None:
    client, _ = serve(FakeAnswer("a b", error=ValueError("not a number")))
    found = client.post(CHAT, {"messages": ASK, "stream": stream})
    if not stream:
        assert found.status == 500 and "not a number" in found.error["message"]
        return
    first, second, error, done = found.events
    assert found.status == 200 and done == "[DONE]"
    assert first["choices"][0]["delta"]["content"] + second["choices"][0]["delta"]["content"]
    assert error["error"]["type"] == "server_error"
    assert "not a number" in error["error"]["message"]


def test_an_error_before_the_first_piece_has_its_own_status(serve: Serve) -> None:
    client, _ = serve(errors={0: RequestError("temperature: too hot"), 1: KeyError("secret")})
    found = client.post(CHAT, {"messages": ASK, "stream": True})
    assert found.status == 400 and found.error["param"] == "temperature"
    found = client.post(CHAT, {"messages": ASK, "stream": True})
    assert found.status == 500 and "secret" not in found.body.decode()
    assert client.post(CHAT, {"messages": ASK}).status == 200


def test_a_dead_closed_or_sleeping_engine(serve: Serve) -> None:
    client, llm = serve(["x", EngineDeadError("rank 1 died"), "x"])
    assert client.get("/ready").status == client.get("/health").status == 200
    llm._driver.sleep(lambda: None, "it sleeps: call wake_up()")
    found = client.post(CHAT, {"messages": ASK})
    assert found.status == 503 and found.error["code"] == "model_asleep"
    assert int(found.headers["retry-after"]) > 0
    assert client.get("/ready").status == 503 and client.get("/ready").json["models"] == {
        "tiny": "asleep"
    }
    assert client.get("/health").status == 200
    llm._driver.wake(lambda: None)
    assert client.post(CHAT, {"messages": ASK}).status == 200
    found = client.post(CHAT, {"messages": ASK})
    assert found.status == 503 and "rank 1" in found.error["message"]
    assert client.get("/health").status == client.get("/ready").status == 503
    llm.close()
    assert client.post(CHAT, {"messages": ASK}).error["code"] == "model_unavailable"


def test_closing_the_model_ends_running_streams(serve: Serve) -> None:
    client, llm = serve("word " * 500, seconds_per_token=0.005)
    with client.open(CHAT, {"messages": ASK, "stream": True}) as stream:
        assert stream.recv(100).startswith(b"HTTP/1.1 200")
        llm.close()
        text = b""
        while b"[DONE]" not in text:
            part = stream.recv(65536)
            assert part
            text += part
    assert b"service_unavailable_error" in text and b"closed" in text


def test_problems_of_our_errors() -> None:
    class Full(RequestError):
        expected_wait = 2.3

    full = error_response(Full("the queue is full"))
    assert full is not None and (full.status, full.code) == (429, "queue_full")
    assert full.headers == {"Retry-After": "3"}
    for error, status in (
        (Refused(403, "no"), 403),
        (OutOfMemoryError("no"), 500),
        (SdkError("no"), 500),
        (RequestError("no"), 400),
    ):
        problem = error_response(error)
        assert problem is not None and problem.status == status
    assert error_response(KeyError("x")) is None


class Guard(Open):
    """Lets "Bearer right" in, once at a time; notes what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.demands: list[Demand] = []
        self.outcomes: list[Outcome] = []
        self.limit = 10**9
        self.headers = {"x-ratelimit-remaining-tokens": "7"}
        self.role: Any = "user"

    async def enter(self, headers: Headers, client: Peer) -> Caller:
        assert client is not None and client[0] == "127.0.0.1"
        if dict(headers).get(b"authorization") != b"Bearer right":
            raise Refused(401, "wrong key", "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        return Caller("ann", "team", 2.0, "salt-of-ann", frozenset((self.role,)))

    async def admit(self, caller: Caller, demand: Demand) -> Admission:
        assert caller.name == "ann"
        if demand.most_tokens > self.limit:
            raise Refused(429, "too much", "rate_limit_exceeded", {"Retry-After": "5"})
        self.demands.append(demand)
        return self

    def finish(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


RIGHT = {"Authorization": "Bearer right"}


def test_the_access_control_is_asked_and_told() -> None:
    guard = Guard()
    with FakeLLM("one two") as llm, running(create_app({"m": llm}, access=guard)) as client:
        found = client.post(CHAT, {"messages": ASK})
        assert found.status == 401 and found.error["code"] == "invalid_api_key"
        assert found.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/models").status == 401
        assert client.get("/health").status == client.get("/ready").status == 200
        asked = {"prompt": ["a", "b c"], "n": 2, "max_tokens": 9}
        found = client.post(TEXT, asked, headers=RIGHT)
        assert found.headers["x-ratelimit-remaining-tokens"] == "7"
        assert guard.demands == [Demand(3, 9, 2, "m", 2)]
        assert guard.demands[0].most_tokens == 3 + 9 * 2 * 2
        assert llm.requests[0].sampling_params.tenant == "team"
        [outcome] = guard.outcomes
        assert (outcome.prompt_tokens, outcome.completion_tokens) == (3, 12)
        assert (outcome.reason, outcome.status) == ("stop", 200) and outcome.seconds > 0
        assert outcome.request_id == found.headers["x-request-id"]
        guard.limit = 5
        found = client.post(TEXT, asked, headers=RIGHT)
        assert found.status == 429 and found.headers["retry-after"] == "5"
        assert found.error["type"] == "rate_limit_error"
        assert client.post("/v1/embeddings", {"input": "a"}, headers=RIGHT).status == 200
        assert guard.demands[-1] == Demand(1, 0, 1, "m", 1)
        assert len(guard.outcomes) == 2
        assert llm.get_metrics()["num_finished"] == 3  # the refused one never ran
        guard.role = "metrics"
        found = client.post(TEXT, {"prompt": "a"}, headers=RIGHT)
        assert found.status == 403 and found.error["type"] == "permission_error"


def test_the_access_control_hears_of_failures_and_departures() -> None:
    guard = Guard()
    answers = FakeAnswer("word " * 300, error=ValueError("NaN"))
    with (
        FakeLLM(answers, seconds_per_token=0.004) as llm,
        running(create_app({"m": llm}, access=guard)) as client,
    ):
        asked = {"prompt": "a", "stream": True}
        with client.open(TEXT, {**asked}) as connection:
            assert b" 401 " in connection.recv(100)
        body = json.dumps(asked).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer right\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(head.encode() + body)
            assert b" 200 " in connection.recv(100)
        eventually(lambda: len(guard.outcomes) == 1)
        assert guard.outcomes[0].reason == "cancelled"
        assert 0 < (guard.outcomes[0].completion_tokens or 0) < 300
        found = client.post(TEXT, {"prompt": "a"}, headers=RIGHT)
        assert found.status == 500
        assert guard.outcomes[1].reason == "error" and "NaN" in str(guard.outcomes[1].error)


def test_a_caller_s_salt_cannot_be_left() -> None:
    """Its requests share prefixes with each other only, whatever salt a body has."""

    class Two(Open):
        async def enter(self, headers: Headers, client: Peer) -> Caller:
            name = dict(headers)[b"authorization"].decode()
            return Caller(name, cache_salt=name)

    def cached(salt: str | None, name: str) -> bool:
        body = {"messages": [{"role": "user", "content": "word " * 100}], "cache_salt": salt}
        found = client.post(CHAT, body, headers={"Authorization": name}).json["usage"]
        return bool(found["prompt_tokens_details"]["cached_tokens"])

    with FakeLLM("x") as llm, running(create_app(llm, access=Two())) as client:
        assert [cached(None, "ann"), cached(None, "ann"), cached(None, "bob")] == [
            False,
            True,
            False,
        ]
        assert [cached("s", "ann"), cached("s", "ann"), cached("s", "bob")] == [False, True, False]
        assert not cached("bob", "ann") and not cached("3:bob:s", "ann")
