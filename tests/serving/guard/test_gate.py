"""The places of a server: how many are inside, and refusals before anything is parsed."""

from __future__ import annotations

import threading

import pytest

from sdk.serving.access import Refused
from sdk.serving.guard import Gate, HttpLimits, protected
from sdk.serving.guard.connections import is_whole_post
from tests.serving.guard.clock import Clock
from tests.serving.guard.serving import App, Connection, ask, post, serving


def test_places_are_counted() -> None:
    gate = Gate(2, Clock())
    first, second = gate.enter(), gate.enter()
    assert gate.full
    with pytest.raises(Refused) as caught:
        gate.enter()
    assert (caught.value.status, caught.value.code) == (429, "server_busy")
    gate.leave(first)
    gate.enter()
    gate.leave(second)
    assert (gate.inside, gate.refused) == (1, 1)


def test_the_time_to_retry_grows_with_the_queue_and_with_slow_requests() -> None:
    clock = Clock()
    gate = Gate(4, clock)
    for _ in range(200):  # of 8 s each
        entered = gate.enter()
        clock.now += 8
        gate.leave(entered)
    for _ in range(4):
        gate.enter()
    waits = [int(gate.refusal().headers["retry-after"]) for _ in range(100)]
    assert waits[:8] == [2, 4, 6, 8, 10, 12, 14, 16]  # 4 places, each free after 8 s
    assert waits[-1] == 60
    clock.now += 1  # those will come back, others are new
    assert gate.refusal().headers["retry-after"] == "2"


WHOLE = post(b'{"a": 1}', "/v1/completions", "Authorization: Bearer x")


def test_a_whole_request_is_recognized() -> None:
    assert is_whole_post(WHOLE)
    assert is_whole_post(post(b"", "/x"))
    assert is_whole_post(post(b"a\r\n\r\nb", "/x"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        WHOLE[:-1],
        WHOLE + b"x",
        WHOLE + WHOLE,
        WHOLE[1:],
        WHOLE.replace(b"POST /", b"GET /"),
        WHOLE.replace(b"POST /", b"POST http://x/"),
        WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"),
        WHOLE.replace(b"HTTP/1.1\r\n", b"\r\nX: HTTP/1.1\r\n"),
        WHOLE.replace(b"\r\n", b"\n"),
        WHOLE.replace(b"\r\nHost", b"\nHost"),
        WHOLE.replace(b"Host", b"X: 1\n\nHost"),
        WHOLE.replace(b"Host", b"Content-Length: 8\r\nHost"),
        WHOLE.replace(b"Host", b"X-Content-Length: 8\r\nHost"),
        WHOLE.replace(b"Content-Length: 8", b"Content-Length: +8"),
        WHOLE.replace(b"Content-Length: 8", b"Content-Length: 8, 8"),
        WHOLE.replace(b"Content-Length: 8", b"Content-Length : 8"),
        WHOLE.replace(b"Content-Length: 8", b"Content-Length: 08888888888"),
        WHOLE.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost"),
        WHOLE.replace(b"Host", b"Transfer-Encoding : chunked\r\nHost"),
        WHOLE.replace(b"Host", b"TRANSFER-ENCODING:chunked\r\nHost"),
        WHOLE.replace(b"Host", b"Expect: 100-continue\r\nHost"),
        WHOLE.replace(b"Host", b"Connection: close\r\nHost"),
        WHOLE.replace(b"Host", b"Origin: https://x\r\nHost"),
        WHOLE.replace(b"Host", b" folded\r\nHost"),
    ],
)
def test_whatever_could_be_read_in_two_ways_is_left_to_the_parser(data: bytes) -> None:
    assert not is_whole_post(data)


def test_a_full_server_refuses_at_once_and_the_connection_stays_usable() -> None:
    app, gate, limits = App(), Gate(1), HttpLimits(requests=1)
    with (
        serving(protected(app, limits=limits, gate=gate), limits, gate) as port,
        Connection(port) as holder,
        Connection(port) as other,
    ):
        holder.send(post(b"{}", "/wait"))
        while not gate.full:
            threading.Event().wait(0.005)
        for _ in range(3):
            other.send(post(b"{}", "/echo"))
            reply = other.reply()
            assert (reply.status, reply.error["code"]) == (429, "server_busy")
            assert int(reply.headers["retry-after"]) >= 1
        other.send(post(b"{}", "/echo")[:30])  # in two pieces: through the application
        threading.Event().wait(0.05)
        other.send(post(b"{}", "/echo")[30:])
        assert other.reply().status == 429
        assert ask(port, b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 200
        app.release.set()
        assert holder.reply().status == 200
        while gate.full:
            threading.Event().wait(0.005)
        other.send(post(b'{"a": 1}', "/echo"))
        assert other.reply().body == b'{"a": 1}'
    assert gate.refused == 4 and gate.inside == 0
    assert app.paths == ["/wait", "/echo", "/echo"]
