"""Clients that leave, hosts that mount the app, several apps, several models."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI

from sdk import RequestError
from sdk.serving import create_app
from sdk.testing import FakeLLM
from tests.serving.serving import Serve, eventually, running

ASK = [{"role": "user", "content": "How are you?"}]
CHAT = "/v1/chat/completions"
SLOW: Any = {"seconds_per_token": 0.004}


def running_requests(llm: FakeLLM) -> int:
    return int(llm.get_metrics()["num_running"] + llm.get_metrics()["num_waiting"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": ASK, "n": 2}),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}),
        ("/v1/responses", {"input": "hi"}),
    ],
    ids=["chat", "completions", "responses"],
)
def test_a_client_that_leaves_frees_its_requests(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    client, llm = serve("word " * 3000, **SLOW)
    with client.open(path, {**body, "stream": stream}) as connection:
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        eventually(lambda: running_requests(llm) > 0)
    steps = llm.get_metrics()["num_steps"]
    eventually(lambda: running_requests(llm) == 0)
    # 3,000 tokens would take 12 s; the steps until the loop has heard of it are few
    assert llm.get_metrics()["num_steps"] - steps < 1500
    assert client.post(CHAT, {"messages": ASK, "max_tokens": 1}).status == 200


def test_a_client_that_leaves_while_its_body_is_read(serve: Serve) -> None:
    client, llm = serve()
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Content-Length: 1000\r\n\r\n{")
    assert client.post(CHAT, {"messages": ASK}).status == 200
    assert len(llm.requests) == 1


def test_one_client_s_departure_leaves_the_others_alone(serve: Serve) -> None:
    client, _ = serve("word " * 50, **SLOW)
    with client.open(CHAT, {"messages": ASK, "stream": True}) as leaving:
        leaving.recv(100)
    found = client.post(CHAT, {"messages": ASK, "stream": True}).events
    assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "stop"


def test_a_slow_reader_gets_everything(serve: Serve) -> None:
    """Its output waits in the sockets' buffers and then in the server, not in other streams."""
    client, _ = serve("word " * 2000)
    with client.open(CHAT, {"messages": ASK, "stream": True}) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert client.post(CHAT, {"messages": ASK, "max_tokens": 2}).status == 200
        text = b""
        while b"[DONE]" not in text:
            text += connection.recv(1024)
    assert text.count(b'"content":" word"') + text.count(b'"content":"word"') == 2000


def test_connections_are_used_again(serve: Serve) -> None:
    client, _ = serve()
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
    for stream in (True, False, True):
        body = json.dumps({"messages": ASK, "stream": stream})
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        if stream:
            first = connection.sock
        assert connection.getresponse().read()
        assert connection.sock is first
    connection.close()


# ---- inside a host -------------------------------------------------------------------------------


def host_of(app: FastAPI, path: str) -> tuple[FastAPI, list[str]]:
    """A host with a lifespan, a middleware, a route and an error handler of its own."""
    happened: list[str] = []

    @contextlib.asynccontextmanager
    async def lifespan(host: FastAPI) -> AsyncIterator[None]:
        happened.append("start")
        yield
        happened.append("stop")

    host = FastAPI(lifespan=lifespan)

    @host.middleware("http")
    async def note(request: Any, call_next: Any) -> Any:
        happened.append(request.url.path)
        return await call_next(request)

    @host.get("/own")
    async def own(number: int) -> dict[str, int]:
        return {"number": number}

    host.mount(path, app)
    return host, happened


def test_an_app_mounted_at_the_root_of_a_host() -> None:
    with FakeLLM("Fine.") as llm:
        host, happened = host_of(create_app({"tiny": llm}), "/")
        with running(host) as client:
            assert client.get("/own?number=3").json == {"number": 3}
            assert client.get("/own?number=x").json["detail"][0]["loc"] == ["query", "number"]
            assert client.post(CHAT, {"messages": ASK}).json["model"] == "tiny"
            assert client.post(CHAT, {"messages": ASK, "stream": True}).events[-1] == "[DONE]"
            assert client.get("/health").status == 200
            assert client.get("/v1/nothing").error["code"] == "unknown_url"
        assert happened[0] == "start" and happened[-1] == "stop"
        assert not {"GET /own", "x-request-id"} & set(happened)
        llm.generate("x")  # the host's owner closes it, not the app


@pytest.mark.parametrize("path", ["/v1", "/api/llm"])
def test_an_app_mounted_below_a_path(path: str) -> None:
    with FakeLLM("Fine.") as llm:
        host, _ = host_of(create_app({"tiny": llm}), path)
        with running(host) as client:
            assert client.post(f"{path}/chat/completions", {"messages": ASK}).status == 200
            assert client.get(f"{path}/models").json["data"][0]["id"] == "tiny"
            found = client.get("/nothing")
            assert found.status == 404 and found.json == {"detail": "Not Found"}
            own = client.get("/own?number=1")
            assert own.status == 200 and "x-request-id" not in own.headers


def test_a_client_of_a_mounted_app_that_leaves_behind_the_host_s_middleware() -> None:
    with FakeLLM("word " * 3000, **SLOW) as llm:
        host, _ = host_of(create_app({"tiny": llm}), "/")
        with running(host) as client:
            with client.open(CHAT, {"messages": ASK, "stream": True}) as connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            eventually(lambda: running_requests(llm) == 0)


def test_two_apps_in_one_process_know_nothing_of_each_other() -> None:
    with FakeLLM("one") as first, FakeLLM("two") as second:
        with running(create_app({"a": first})) as left, running(create_app({"b": second})) as right:
            assert left.post(CHAT, {"messages": ASK, "model": "a"}).status == 200
            assert left.get("/v1/models/b").status == 404
            answer = right.post(CHAT, {"messages": ASK}).json["choices"][0]["message"]["content"]
            assert answer == "two"
        with running(create_app({"a": first, "b": second})) as both:
            for name, text in (("a", "one"), ("b", "two")):
                found = both.post(CHAT, {"messages": ASK, "model": name}).json
                assert found["choices"][0]["message"]["content"] == text


def test_several_models_one_of_which_was_closed() -> None:
    first, second = FakeLLM("one"), FakeLLM("two")
    with first, second, running(create_app({"a": first, "b": second})) as client:
        names = [card["id"] for card in client.get("/v1/models").json["data"]]
        assert names == ["a", "b"]
        first.close()
        assert client.post(CHAT, {"messages": ASK, "model": "a"}).status == 503
        assert client.post(CHAT, {"messages": ASK, "model": "b"}).status == 200
        assert client.get("/health").json["models"].keys() == {"a"}


def test_what_is_no_model_is_refused() -> None:
    with FakeLLM("x") as llm:
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            ({}, {}, "expected at least one"),
            ({"a": 3}, {}, "expected an LLM for 'a', found 3"),
            ({"": llm}, {}, "expected names as keys"),
            ({"a": llm}, {"model_name": "b"}, "leave it out"),
        ]
        for models, more, message in wrong:
            with pytest.raises(RequestError, match=message):
                create_app(models, **more)
        names = [create_app(llm).title, create_app(llm, model_name="mine").title]
        assert names == ["embedlm", "embedlm"]


def test_a_single_model_has_the_name_of_its_file(serve: Serve) -> None:
    with FakeLLM("x") as llm, running(create_app(llm)) as client:
        assert client.get("/v1/models").json["data"][0]["id"] == "fake"
    with FakeLLM("x") as llm, running(create_app(llm, model_name="mine")) as client:
        assert client.get("/v1/models").json["data"][0]["id"] == "mine"
        assert client.get("/v1/models").json["data"][0]["max_model_len"] == 4096


def test_the_time_to_drain_is_over(serve: Serve) -> None:
    """A stopped server tells the clients of requests that it aborts."""
    with FakeLLM("word " * 3000, **SLOW) as llm:
        with running(create_app(llm), seconds=0) as client:
            connection = client.open(CHAT, {"messages": ASK, "stream": True})
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        text = b""
        while part := connection.recv(65536):
            text += part
        connection.close()
        assert b'"code": "stopping"' in text and b"[DONE]" in text
        eventually(lambda: running_requests(llm) == 0)


def test_requests_may_end_while_the_server_drains() -> None:
    with FakeLLM("word " * 40, seconds_per_token=0.01) as llm:
        with running(create_app(llm), seconds=20) as client:
            connection = client.open(CHAT, {"messages": ASK, "stream": True})
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        text = b""
        while part := connection.recv(65536):
            text += part
        connection.close()
        assert b'"finish_reason":"stop"' in text and b"[DONE]" in text


def test_importing_sdk_imports_no_web_framework() -> None:
    names = "('fastapi', 'uvicorn', 'sdk.serving')"
    code = f"import sys, sdk; print([name for name in {names} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
