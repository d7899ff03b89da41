"""The HTTP client of a load test, against a server whose bytes the test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sdk.api.errors import RequestError, SdkError
from sdk.bench.serve.http_connection import (
    Address,
    HttpClient,
    ProtocolError,
    ResponseReader,
)
from sdk.bench.serve.http_target import HttpTarget, find_model
from sdk.bench.serve.load import RequestFailed
from sdk.bench.serve.record import Record
from tests.bench.serve.fake_server import (
    DONE,
    HEAD,
    Asked,
    FakeServer,
    answer,
    chunk,
    event,
    plain,
    running,
    usage,
)

STREAM = HEAD + chunk(event("a")) + chunk(event("b") + usage(3, 2)) + chunk(DONE) + b"0\r\n\r\n"


def read(data: bytes, size: int) -> tuple[ResponseReader, list[bytes]]:
    """The response in pieces of ``size`` bytes."""
    events: list[bytes] = []
    reader = ResponseReader(events.append)
    for begin in range(0, len(data), size):
        assert not reader.complete
        reader.feed(data[begin : begin + size])
    return reader, events


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10**6])
def test_a_stream_reads_the_same_in_pieces_of_any_size(size: int) -> None:
    reader, events = read(STREAM, size)
    assert reader.complete and reader.keeps_alive and reader.status == 200
    assert [data[:10] for data in events] == [
        b'{"choices"',
        b'{"choices"',
        b'{"choices"',
        b"[DONE]",
    ]


@pytest.mark.parametrize("size", [1, 5, 10**6])
def test_bodies_end_by_length_or_with_the_connection(size: int) -> None:
    reader, _ = read(plain(400, {"error": "x"}), size)
    assert (reader.status, bytes(reader.body), reader.complete) == (400, b'{"error": "x"}', True)
    assert reader.keeps_alive
    endless, _ = read(b"HTTP/1.0 200 OK\r\n\r\nall of it", size)
    assert not endless.complete
    endless.end_of_input()
    assert endless.complete and not endless.keeps_alive and bytes(endless.body) == b"all of it"
    empty, _ = read(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", size)
    assert empty.complete and not empty.keeps_alive
    waited, _ = read(b"HTTP/1.1 100 Continue\r\n\r\n" + plain(200, 1), 10**6)
    assert waited.status == 200 and waited.complete


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n", HEAD + b"zz\r\n", b"\0" * 70000]
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not HTTP"):
        read(data, 10**6)


def test_a_response_that_is_cut_is_not_complete() -> None:
    for end in (0, 5, len(HEAD), len(STREAM) - 1):
        reader, _ = read(STREAM[:end], 10**6)
        with pytest.raises(ProtocolError, match="disconnected"):
            reader.end_of_input()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", Address("localhost", 8000, False, "/v1")),
        ("http://localhost:8000/v1/", Address("localhost", 8000, False, "/v1")),
        ("https://host/openai/v1", Address("host", 443, True, "/openai/v1")),
        ("http://[::1]:5", Address("::1", 5, False, "/v1")),
    ],
)
def test_a_url_is_an_address(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://x", "http://", "http://h:99999", "http://u:p@h", "http://["],
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="--url: expected http://HOST:PORT"):
        Address.parse(url)


def ask(
    server: FakeServer, count: int = 1, *, chat: bool = False, output_len: int = 3
) -> list[Record]:
    """Ask one after the other, over one client."""

    async def run() -> list[Record]:
        client = HttpClient(Address.parse(server.url), {"X-Test": "yes"})
        target = HttpTarget(client, "fake", chat=chat, body={"top_k": 5})
        records = []
        for _ in range(count):
            record = Record(0.0)
            prompt = [{"role": "user", "content": "one two"}] if chat else "one two"
            await target.ask(prompt, 3, record)
            records.append(record)
        client.close()
        return records

    return asyncio.run(run())


def test_a_completion_has_its_pieces_and_numbers_of_tokens() -> None:
    with running(FakeServer()) as server:
        (record,) = ask(server)
    assert record.text == [" w0", " w1", " w2"]
    assert (record.prompt_tokens, record.output_tokens, len(record.gaps)) == (2, 3, 2)
    assert record.first is not None and record.sent < record.first <= record.last
    (asked,) = server.questions
    assert asked.path == "/v1/completions" and asked.headers["x-test"] == "yes"
    assert asked.body == {
        "model": "fake",
        "prompt": "one two",
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 5,
    }


def test_the_chunk_with_the_role_of_a_chat_is_not_its_first_token() -> None:
    with running(FakeServer(delay_s=0.05)) as server:
        (record,) = ask(server, chat=True)
    assert record.first is not None and record.first - record.sent >= 0.05
    assert len(record.text) == 3
    assert server.questions[0].path == "/v1/chat/completions"


def test_connections_are_used_again() -> None:
    with running(FakeServer()) as server:
        assert len(ask(server, 5)) == 5
    assert server.connections == 1


def test_a_connection_that_the_server_closed_while_idle_is_replaced() -> None:
    async def once(server: FakeServer, asked: Asked, writer: asyncio.StreamWriter) -> None:
        await answer(server, asked, writer)
        await writer.drain()
        writer.close()  # without having said so

    with running(FakeServer(once)) as server:
        assert len(ask(server, 4)) == 4
    assert server.connections == 4


def reply(*parts: bytes, close: bool = False) -> Callable[..., Awaitable[None]]:
    async def behave(server: FakeServer, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(parts))
        if close:
            await writer.drain()
            writer.close()

    return behave


@pytest.mark.parametrize(
    ("parts", "close", "kind", "detail"),
    [
        ([plain(429, {"error": "slow down"})], False, "HTTP 429", "slow down"),
        ([HEAD, chunk(event("a"))], True, "disconnected", ""),
        ([], True, "disconnected", ""),
        ([HEAD, chunk(event("a")), b"0\r\n\r\n"], False, "incomplete stream", ""),
        ([plain(200, {"choices": []})], False, "no streamed answer", ""),
        ([HEAD, chunk(b"data: {oops\n\n"), b"0\r\n\r\n"], False, "unreadable chunk", ""),
        ([HEAD, chunk(b"data: []\n\n"), b"0\r\n\r\n"], False, "unreadable chunk", ""),
        (
            [HEAD, chunk(b'data: {"error": {"message": "no"}}\n\n' + DONE), b"0\r\n\r\n"],
            False,
            "error in the stream",
            "",
        ),
        ([b"nonsense\r\n\r\n"], False, "not HTTP", ""),
    ],
)
def test_a_failed_request_has_a_kind(
    parts: list[bytes], close: bool, kind: str, detail: str
) -> None:
    with (
        running(FakeServer(reply(*parts, close=close))) as server,
        pytest.raises(RequestFailed) as found,
    ):
        ask(server)
    assert found.value.kind == kind and detail in str(found.value)


def test_a_server_that_is_not_there_is_a_failed_request() -> None:
    with running(FakeServer()) as server:
        pass
    with pytest.raises(RequestFailed) as found:
        ask(server)
    assert found.value.kind == "no connection"


def test_a_server_that_counts_no_tokens_is_counted_by_pieces() -> None:
    pieces = [chunk(event(text)) for text in ("a", "b", "c")]
    end = chunk(event("", finish="length"))  # and no [DONE]
    with running(FakeServer(reply(HEAD, *pieces, end, b"0\r\n\r\n"))) as server:
        (record,) = ask(server)
    assert (record.output_tokens, record.prompt_tokens) == (3, 0)


def test_reasoning_is_text_too() -> None:
    pieces = [
        chunk(b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'),
        chunk(event("yes", chat=True) + DONE),
    ]
    with running(FakeServer(reply(HEAD, *pieces, b"0\r\n\r\n"))) as server:
        (record,) = ask(server, chat=True)
    assert record.text == ["hm", "yes"]


def model_of(url: str, name: str | None = None) -> str:
    async def run() -> str:
        client = HttpClient(Address.parse(url))
        try:
            return await find_model(client, url, name)
        finally:
            client.close()

    return asyncio.run(run())


def test_the_model_is_the_first_of_the_server_unless_named() -> None:
    with running(FakeServer()) as server:
        assert model_of(server.url) == "fake"
        assert model_of(server.url, "mine") == "mine"
    with pytest.raises(SdkError, match="cannot be reached"):
        model_of(server.url)


def test_a_server_without_a_list_of_models_needs_a_name() -> None:
    async def nothing(server: FakeServer, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(404, {}))

    with (
        running(FakeServer(nothing, models=False)) as server,
        pytest.raises(SdkError, match="expected a list of models at /v1/models, found HTTP 404"),
    ):
        model_of(server.url)
