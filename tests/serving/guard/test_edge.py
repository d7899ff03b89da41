"""What requests pass before the application, over real sockets."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sdk.serving.guard import ByKey, GuardedAccess, HttpLimits, Origins, protected
from tests.serving.guard.serving import App, Connection, Reply, ask, post, serving

LIMITS = HttpLimits(body_bytes=200_000, requests=2, buffered_bytes=300_000)
#: For clients that are too slow; nothing else is asked of such a server.
HASTY = HttpLimits(body_seconds=0.4, head_seconds=0.5, request_seconds=1.0, requests=2)
ORIGINS = Origins.for_address("127.0.0.1", allowed=["https://chat.example.com"])
KEY = "Authorization: Bearer right"
CHUNKED = "Transfer-Encoding: chunked"


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture(params=["httptools", "h11"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either of uvicorn's parsers."""
    from uvicorn.protocols.http import auto, h11_impl, httptools_impl

    parsers = {"h11": h11_impl.H11Protocol, "httptools": httptools_impl.HttpToolsProtocol}
    monkeypatch.setattr(auto, "AutoHTTPProtocol", parsers[request.param])


@pytest.fixture
def port(parser: None, app: App) -> Iterator[int]:
    """The port of a protected application."""
    access = GuardedAccess(ByKey(["right"]))
    with serving(protected(app, access=access, limits=LIMITS, origins=ORIGINS), LIMITS) as port:
        yield port


@pytest.fixture
def hasty(parser: None, app: App) -> Iterator[int]:
    """The same with short times."""
    access = GuardedAccess(ByKey(["right"]))
    with serving(protected(app, access=access, limits=HASTY), HASTY) as port:
        yield port


def trickle(connection: Connection, data: bytes) -> Reply:
    """Send ``data`` again and again, slowly, until an answer comes."""
    while not select.select([connection.socket], [], [], 0.05)[0]:
        with contextlib.suppress(OSError):
            connection.send(data)
    return connection.reply()


def wait_until(done: Any) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def test_a_request_passes_and_the_response_has_security_headers(port: int) -> None:
    with Connection(port) as connection:
        for _ in range(3):
            connection.send(post(b'{"a": 1}', "/echo", KEY))
            reply = connection.reply()
            assert (reply.status, reply.body) == (200, b'{"a": 1}')
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["x-frame-options"] == "DENY"
    assert reply.headers["cache-control"] == "no-store"
    assert "default-src 'self'" in reply.headers["content-security-policy"]
    assert "server" not in reply.headers


def test_a_chunked_body_arrives_whole(port: int) -> None:
    body = chunk(b'{"a": ') + chunk(b"1}") + b"0\r\n\r\n"
    reply = ask(port, post(body, "/echo", KEY, CHUNKED, length=False))
    assert (reply.status, reply.body) == (200, b'{"a": 1}')


@pytest.mark.parametrize("header", ["", "Authorization: Bearer wrong", "X-API-Key: wrong"])
def test_without_a_key_the_body_is_not_read(port: int, app: App, header: str) -> None:
    with Connection(port) as connection:
        # The body never comes; a server that reads it first would not answer.
        request = post(
            b"", "/echo", *filter(None, [header]), "Content-Length: 150000", length=False
        )
        connection.send(request)
        reply = connection.reply()
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert app.paths == []


def test_a_connection_stays_usable_after_a_small_refused_request(port: int) -> None:
    with Connection(port) as connection:
        for key, status in (("X-API-Key: wrong", 401), (KEY, 200), ("X-API-Key: wrong", 401)):
            connection.send(post(b'{"a": 1}', "/echo", key))
            assert connection.reply().status == status


def test_an_announced_body_that_is_too_large_is_not_read(port: int, app: App) -> None:
    with Connection(port) as connection:
        connection.send(post(b"", "/echo", KEY, "Content-Length: 200001", length=False))
        reply = connection.reply()
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert "200000" in reply.error["message"]
        assert reply.headers["connection"] == "close"
    assert app.paths == []


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_a_too_large_body_gets_the_answer(port: int, chunked: bool) -> None:
    with Connection(port) as connection:
        data = b"x" * 5_000_000  # more than all buffers on the way hold
        if chunked:
            connection.send(post(chunk(data) + b"0\r\n\r\n", "/echo", KEY, CHUNKED, length=False))
        else:
            connection.send(post(data, "/echo", KEY))
        assert connection.reply().status == 413
        assert connection.closed()


def test_an_endless_chunked_body_is_cut_off(port: int) -> None:
    with Connection(port) as connection:
        connection.send(post(b"", "/echo", KEY, CHUNKED, length=False))
        end = time.monotonic() + 20
        with pytest.raises(OSError):
            while time.monotonic() < end:
                connection.send(chunk(b"x" * 65536))
                time.sleep(0.001)


def test_expect_100_continue(port: int) -> None:
    with Connection(port) as connection:
        connection.send(
            post(b"", "/echo", KEY, "Content-Length: 2", "Expect: 100-continue", length=False)
        )
        assert connection.reply().status == 100
        connection.send(b"{}")
        assert connection.reply().body == b"{}"
    with Connection(port) as connection:  # refused before the client sends anything
        connection.send(
            post(b"", "/echo", KEY, "Content-Length: 999999", "Expect: 100-continue", length=False)
        )
        assert connection.reply().status == 413
        assert connection.closed()


def test_a_slow_body_times_out_and_frees_its_place(hasty: int, app: App) -> None:
    for _ in range(3):
        with Connection(hasty) as slow:
            slow.send(post(b"{", "/echo", KEY, "Content-Length: 1000", length=False))
            reply = trickle(slow, b" ")  # one byte at a time does not help
            assert (reply.status, reply.error["code"]) == (408, "body_timeout")
    assert app.paths == []


def test_a_slow_head_times_out(hasty: int) -> None:
    with Connection(hasty) as slow:
        slow.send(b"POST /echo HTTP/1.1\r\nHost: localhost\r\n")
        reply = trickle(slow, b"X-A: 1\r\n")
        assert (reply.status, reply.error["code"]) == (408, "head_timeout")
        assert slow.closed()


def test_a_connection_that_sends_nothing_is_closed(hasty: int) -> None:
    with Connection(hasty) as idle:
        assert idle.closed()


def test_a_slow_second_head_times_out(hasty: int) -> None:
    with Connection(hasty) as slow:
        slow.send(b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\nPOST /ec")
        assert slow.reply().status == 200
        slow.send(b"ho")
        assert slow.reply().status == 408
        assert slow.closed()


def test_a_client_that_leaves_while_it_sends_frees_its_place(port: int, app: App) -> None:
    for _ in range(5):
        with Connection(port) as gone:
            gone.send(post(b"{", "/echo", KEY, "Content-Length: 100", length=False))
    wait_until(lambda: ask(port, post(b"{}", "/echo", KEY)).status == 200)
    assert set(app.paths) == {"/echo"}


def test_huge_headers_are_refused(port: int) -> None:
    reply = ask(port, post(b"{}", "/echo", KEY, "X-A: " + "x" * 33_000))
    assert reply.status in (400, 431)  # h11 has a limit of its own
    reply = ask(port, post(b"{}", "/echo", KEY, *["X-A: 1"] * 120))
    assert reply.status in (400, 431)


def test_endless_headers_are_cut_off(port: int) -> None:
    with Connection(port) as connection:
        connection.send(b"POST /echo HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError):
            for _ in range(10_000):  # 10 MB
                connection.send(b"X-A: " + b"x" * 1000 + b"\r\n")
                time.sleep(0.0005)


def test_the_places_are_limited_and_the_refusal_is_prompt(port: int, app: App) -> None:
    holders = [Connection(port) for _ in range(2)]
    for holder in holders:
        holder.send(post(b"{}", "/wait", KEY))
    wait_until(lambda: len(app.paths) == 2)
    reply = ask(port, post(b"{}", "/echo", KEY))
    assert (reply.status, reply.error["code"]) == (429, "server_busy")
    assert int(reply.headers["retry-after"]) >= 1
    assert ask(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 200
    app.release.set()
    for holder in holders:
        assert holder.reply().status == 200
        holder.__exit__()
    assert ask(port, post(b"{}", "/echo", KEY)).status == 200


def test_large_bodies_share_a_budget(port: int, app: App) -> None:
    with Connection(port) as first:
        first.send(post(b"x" * 190_000, "/echo", KEY, "Content-Length: 199999", length=False))
        replies: list[Reply] = []  # until the server has read the first

        def refused() -> bool:
            replies.append(ask(port, post(b" " * 190_000, "/echo", KEY)))
            return replies[-1].status != 200

        wait_until(refused)
        assert (replies[-1].status, replies[-1].error["code"]) == (429, "server_busy")
    assert ask(port, post(b" " * 190_000, "/echo", KEY)).status == 200


def test_a_late_response_is_an_error_and_ends_the_application(hasty: int, app: App) -> None:
    reply = ask(hasty, post(b"{}", "/late", KEY))
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    assert app.gone.wait(20)


def test_a_late_stream_ends_with_an_error_event(hasty: int, app: App) -> None:
    with Connection(hasty) as connection:
        connection.send(post(b"{}", "/stream", KEY, "Connection: close"))
        text = connection.reply().body
    assert b'data: {"error": {"message": "The response was not complete after 1 s.' in text
    assert text.endswith(b"0\r\n\r\n")
    assert app.gone.wait(20)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/api/stream", b'{"error": "The response was not complete after 1 s."}\n'),
        ("/v1/messages/stream", b'data: {"error": '),
    ],
)
def test_the_last_event_is_that_of_the_path_s_api(hasty: int, path: str, last: bytes) -> None:
    with Connection(hasty) as connection:
        connection.send(post(b"{}", path, KEY, "Connection: close"))
        assert last in connection.reply().body


def test_errors_have_the_shape_of_the_path_s_api(port: int) -> None:
    for path in ("/api/chat", "/mounted/api/blobs/sha256:0"):
        assert "No API key" in json.loads(ask(port, post(b"{}", path)).body)["error"]
    for path in ("/v1/messages", "/messages/count_tokens"):
        value = json.loads(ask(port, post(b"{}", path)).body)
        assert value["type"] == "error" and value["error"]["type"] == "authentication_error"
    assert ask(port, post(b"{}", "/v1/responses")).error["type"] == "authentication_error"


def test_exceptions_show_nothing(port: int, app: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "sdk.serving")
    reply = ask(port, post(b"{}", "/raise", KEY))
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert b"secret" not in reply.body and b"Traceback" not in reply.body
    assert "a secret of the host" in caplog.text  # for the operator
    with Connection(port) as connection:
        connection.send(post(b"{}", "/raise-late", KEY))
        body = connection.reply().body
        assert b"secret" not in body and not body.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "request_line",
    [
        "POST /../etc/passwd HTTP/1.1",
        "POST /v1/%2e%2e/%2e%2e/etc/passwd HTTP/1.1",
        "POST /v1/..%2f..%2fetc HTTP/1.1",
        "POST /v1/%00 HTTP/1.1",
        "POST /v1/%5c..%5cx HTTP/1.1",
        "POST /v1/\\..\\x HTTP/1.1",
        "POST /" + "a" * 5000 + " HTTP/1.1",
        "POST /v1/é HTTP/1.1",
        "POST http://[::1 HTTP/1.1",
    ],
)
def test_path_tricks(port: int, app: App, request_line: str) -> None:
    text = f"{request_line}\r\nHost: localhost\r\n{KEY}\r\nContent-Length: 2\r\n\r\n{{}}"
    assert ask(port, text.encode()).status in (400, 414)
    assert app.paths == []


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://evil.example/echo", "localhost", 403),
        ("http://evil.example:80/echo", "localhost:80", 403),
        ("http://localhost@evil.example/echo", "localhost", 403),
        ("http://localhost:1@evil.example/echo", "localhost", 403),
        ("http://[::2]/echo", "localhost", 403),
        ("http://localhost/echo", "localhost", 200),
        ("http://localhost:81/echo", "evil.example", 200),
    ],
)
def test_the_host_of_a_target_counts(port: int, target: str, host: str, status: int) -> None:
    """With h11 such a target is not a path."""
    from uvicorn.protocols.http import auto

    known = hasattr(auto.AutoHTTPProtocol, "on_url")
    found = ask(port, post(b"{}", target, KEY, host=host)).status
    assert found == status if known else found in (400, 403)


def test_overlong_utf8_is_no_dot(port: int, app: App) -> None:
    ask(port, post(b"{}", "/v1/%c0%ae%c0%ae/x", KEY))
    assert not any(".." in path for path in app.paths)


@pytest.mark.parametrize(
    "headers",
    [
        ["Content-Length: 2", "Content-Length: 3"],
        ["Content-Length: 2", CHUNKED],
        ["Content-Length: 2", "Transfer-Encoding: identity, chunked"],
        [CHUNKED, CHUNKED],
        ["Content-Length: 2, 3"],
        ["Content-Length: +2"],
        ["Content-Length: -1"],
        ["Content-Length: 0x2"],
        ["Content-Length : 2"],
        ["Transfer-Encoding: xchunked"],
        ["Transfer-Encoding: chunked, identity"],
        ["Transfer-Encoding:\x0bchunked"],
        ["Transfer-Encoding : chunked"],
        ["Content-Length: 2", "X: 1\rContent-Length: 5"],
        ["Content-Length: 2", "X\x00: 1"],
        ["Content-Length: 2", " folded: 1"],
    ],
)
def test_smuggled_requests_do_not_reach_the_application(
    port: int, app: App, headers: list[str]
) -> None:
    """A request whose end two programs could see at different places is refused, and what follows
    it on the connection is not taken for a request."""
    smuggled = b"POST /smuggled HTTP/1.1\r\nHost: localhost\r\n" + KEY.encode()
    request = post(b"{}", "/echo", KEY, *headers, length=False)
    with Connection(port) as connection:
        connection.send(request + smuggled + b"\r\nContent-Length: 2\r\n\r\n{}")
        reply = connection.reply()
        assert reply.status in (400, 408, 501)
    assert "/smuggled" not in app.paths


@pytest.mark.parametrize(
    "headers",
    [
        [KEY, KEY],
        [KEY, "Authorization: Bearer other"],
        [KEY, "Host: evil.example"],
        [KEY, "Content-Type: text/plain"],
        [KEY, "Origin: https://chat.example.com", "Origin: https://evil.example"],
    ],
)
def test_headers_that_occur_twice(port: int, app: App, headers: list[str]) -> None:
    assert ask(port, post(b"{}", "/echo", *headers)).status == 400
    assert app.paths == []


@pytest.mark.parametrize(
    "value", ["Bearer \xff\xfe", "Bearer " + "x" * 20_000, "Bearer", "Basic right", "right"]
)
def test_strange_keys(port: int, app: App, value: str) -> None:
    reply = ask(port, post(b"{}", "/echo", f"Authorization: {value}"))
    assert reply.status in (400, 401)
    assert "x" * 100 not in reply.body.decode()
    assert app.paths == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://chat.example.com"}, 200),
        ({"host": "localhost:81", "origin": "http://localhost:81"}, 200),
    ],
)
def test_pages_of_others(port: int, headers: dict[str, str], status: int) -> None:
    lines = [f"{name}: {value}" for name, value in headers.items() if name != "host"]
    request = post(b"{}", "/echo", KEY, *lines, host=headers.get("host", "localhost"))
    reply = ask(port, request)
    assert reply.status == status
    allowed = reply.headers.get("access-control-allow-origin")
    assert allowed == (headers["origin"] if "chat" in headers.get("origin", "") else None)


def test_cors_preflight(port: int) -> None:
    for origin, status in (("https://chat.example.com", 200), ("https://evil.example", 400)):
        reply = ask(
            port,
            f"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n"
            "Access-Control-Request-Method: POST\r\n"
            "Access-Control-Request-Headers: authorization, content-type, x-stainless-os\r\n"
            "\r\n".encode(),
        )
        assert reply.status == status
        assert ("access-control-allow-origin" in reply.headers) == (status == 200)
        if status == 200:
            assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in reply.headers


def test_no_cors_without_allowed_origins(app: App) -> None:
    with serving(protected(app)) as port:
        reply = ask(port, post(b"{}", "/echo", "Origin: https://evil.example"))
    assert reply.status == 403
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 30_000, b"\xff\xfe{\x00}\x00", b"[" * 65 + b"]" * 65],
)
def test_hostile_json_does_not_reach_the_application(port: int, app: App, body: bytes) -> None:
    reply = ask(port, post(body, "/echo", KEY))
    assert (reply.status, reply.error["code"]) == (400, "invalid_json")
    assert app.paths == []


def test_a_compressed_body_is_not_unpacked(port: int) -> None:
    bomb = gzip.compress(b"0" * 50_000_000)
    reply = ask(port, post(bomb, "/echo", KEY, "Content-Encoding: gzip"))
    assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 20 + b"nonsense\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\x00" * 1000,
    ],
)
def test_what_is_not_http_is_refused(port: int, app: App, data: bytes) -> None:
    with Connection(port) as connection:
        connection.send(data)
        answer = connection.socket.recv(4096)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert app.paths == []
    assert ask(port, post(b"{}", "/echo", KEY)).status == 200


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    with Connection(port) as connection:
        connection.send(b"".join(post(b"%d" % n, "/echo", KEY) for n in range(5)))
        assert [connection.reply().body for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


def test_one_connection_too_many_is_told_so(app: App) -> None:
    limits = HttpLimits(connections=3)
    with serving(protected(app, limits=limits), limits) as port:
        open_ones = [Connection(port) for _ in range(3)]
        for one in open_ones:
            one.send(post())
            assert one.reply().status == 200
        reply = ask(port, post())
        assert (reply.status, reply.error["code"]) == (503, "server_busy")
        assert reply.headers["retry-after"] == "1"
        for one in open_ones:
            one.__exit__()
        wait_until(lambda: ask(port, post()).status == 200)


def test_a_client_that_does_not_read_is_cut_off(app: App) -> None:
    limits = HttpLimits(stalled_seconds=0.3)
    with serving(protected(app, limits=limits), limits) as port, Connection(port) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.send(post(b"{}", "/flood"))
        assert app.gone.wait(20)


def test_idle_connections_are_closed(app: App) -> None:
    limits = HttpLimits(idle_seconds=0.2)
    with serving(protected(app, limits=limits), limits) as port, Connection(port) as connection:
        connection.send(post())
        assert connection.reply().status == 200
        assert connection.closed()


def test_hundreds_of_wrong_requests_leave_nothing_behind(port: int, app: App) -> None:
    before = threading.active_count()
    whole = post(b"{}", "/echo", KEY)
    for index in range(200):
        with Connection(port) as connection:
            connection.send(whole[: index % len(whole)])
    for _ in range(200):
        assert ask(port, post(b"{}", "/echo")).status == 401
    assert ask(port, post(b"{}", "/echo", KEY)).status == 200
    assert app.paths == ["/echo"]
    assert threading.active_count() <= before
