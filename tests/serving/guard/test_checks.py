"""Checks of heads, paths, origins, depth and parameters, without a server."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sdk.api.errors import RequestError
from sdk.serving.access import Headers, Refused
from sdk.serving.guard import BodyLimits, HttpLimits, Origins
from sdk.serving.guard.http_limits import check_path
from sdk.serving.guard.json_depth import check_depth
from sdk.serving.guard.origins import is_loopback


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


# Strings with all that could be taken for structure.
text = st.text(alphabet='[]{}"\\,:a\n\u2028é', max_size=8)
values = st.recursive(
    st.one_of(text, st.integers(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=25,
)


@given(values, st.booleans(), st.sampled_from([None, 2]))
def test_the_depth_is_exact(value: Any, escape: bool, indent: int | None) -> None:
    data = json.dumps(value, ensure_ascii=escape, indent=indent).encode()
    depth = depth_of(value)
    check_depth(data, max(depth, 1))
    if depth >= 2:
        with pytest.raises(Refused, match=f"nested deeper than {depth - 1} levels"):
            check_depth(data, depth - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'["' + b"[" * 100 + b'"' + b"[" * 100,
        b'["\\\\",' + b"[" * 100 + b"]" * 100 + b"]",
        b'["\\\\\\"",' + b"[" * 100 + b"]" * 100 + b"]",
    ],
)
def test_deep_or_broken_structures_are_refused(data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        check_depth(data, 64)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "data",
    [
        b'["' + b"[" * 100 + b'"]',
        b'["\\"' + b"[" * 100 + b'"]',
        b'["\\\\\\"' + b"[" * 100 + b'"]',
        b"[" + b"[]," * 100_000 + b"[]]",
        b"]" * 100_000,  # the parser says what is wrong
        b'"' + b'\\"' * 100_000 + b"[" * 100,  # unfinished
    ],
)
def test_brackets_in_strings_and_wide_structures_are_fine(data: bytes) -> None:
    check_depth(data, 64)


def test_other_encodings_cannot_hide_a_structure() -> None:
    with pytest.raises(Refused, match="UTF-8"):
        check_depth(json.dumps([[1]]).encode("utf-16"), 64)


def test_the_largest_body_takes_linear_time() -> None:
    # Not timed: 4 MiB of the worst inputs would take hours if a string were searched twice.
    for data in (b'"' + b'\\"' * 2**21, b'"[' * 2**21, b"[]" * 2**21, b'["\\\\"' * 2**19):
        with contextlib.suppress(Refused):
            check_depth(data, 64)


def head(*headers: tuple[bytes, bytes]) -> Headers:
    return [(b"host", b"localhost:8000"), *headers]


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ((b"/" + b"a" * 4096, b""), head(), 414),
        ((b"/a", b"x" * 4095), head(), 414),
        ((b"/",), head(*[(b"x", b"")] * 100), 431),
        ((b"/",), head((b"x", b"y" * 33_000)), 431),
        ((b"/",), head(*[(b"x", b"y" * 1000)] * 33), 431),
        ((b"/",), head((b"authorization", b"a"), (b"authorization", b"a")), 400),
        ((b"/",), head((b"host", b"evil.example")), 400),
        ((b"/",), head((b"content-length", b"5"), (b"content-length", b"5")), 400),
        ((b"/",), head((b"content-type", b"a"), (b"content-type", b"b")), 400),
        ((b"/",), head((b"origin", b"a"), (b"origin", b"b")), 400),
    ],
)
def test_wrong_heads_are_refused(target: Any, headers: Headers, status: int) -> None:
    with pytest.raises(Refused) as caught:
        HttpLimits().check_head(target, headers)
    assert caught.value.status == status


def test_ordinary_heads_are_fine() -> None:
    cookies = [(b"cookie", b"a=1"), (b"cookie", b"b=2"), (b"x-forwarded-for", b"10.0.0.1")] * 2
    HttpLimits().check_head((b"/v1/chat/completions", b"a=b"), head(*cookies))


@pytest.mark.parametrize("value", [b"-1", b"+5", b"5 ", b"0x10", b"1e3", b"", b"\xb2", b"5, 5"])
def test_a_length_that_is_no_number_is_refused(value: bytes) -> None:
    with pytest.raises(Refused, match="not a number"):
        HttpLimits().check_length([(b"content-length", value)])


@pytest.mark.parametrize("value", [b"4194305", b"9" * 400])
def test_a_length_above_the_limit_is_refused(value: bytes) -> None:
    with pytest.raises(Refused) as caught:
        HttpLimits().check_length([(b"content-length", value)])
    assert caught.value.status == 413
    HttpLimits().check_length([(b"content-length", b"4194304")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"body_bytes": 0}, "body_bytes: expected a whole number above 0, found 0"),
        ({"body_bytes": 1.5}, "body_bytes"),
        ({"connections": None}, "connections"),
        ({"body_seconds": -1}, "body_seconds: expected a number above 0"),
        ({"requests": True}, "requests"),
        ({"head_seconds": float("nan")}, "head_seconds"),
    ],
)
def test_wrong_http_limits_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        HttpLimits(**options)
    HttpLimits(request_seconds=None)


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "/v1/..", "/v1/../x", "/./x", "/a\\..\\b", "/a\x00", "/a\r\nb", "/a\x7f"],
)
def test_path_tricks_are_refused(path: str) -> None:
    with pytest.raises(Refused, match="path"):
        check_path(path)


@pytest.mark.parametrize("path", ["/", "/v1/models/a..b", "/.well-known/x", "/ü", "//", "/a b"])
def test_ordinary_paths_are_fine(path: str) -> None:
    check_path(path)


LOCAL = Origins.for_address("127.0.0.1", allowed=["https://chat.example.com", "http://a:81"])


@pytest.mark.parametrize(
    ("origins", "headers", "code"),
    [
        (LOCAL, {"host": "127.0.0.1:8000"}, None),
        (LOCAL, {"host": "localhost"}, None),
        (LOCAL, {"host": "LOCALHOST.:8000"}, None),
        (LOCAL, {"host": "[::1]:8000"}, None),
        (LOCAL, {"host": "evil.example:8000"}, "unknown_host"),
        (LOCAL, {"host": "localhost.evil.example"}, "unknown_host"),
        (LOCAL, {"host": "127.0.0.1.evil.example"}, "unknown_host"),
        (LOCAL, {"host": "evil@127.0.0.1"}, "unknown_host"),
        (LOCAL, {"host": ""}, "unknown_host"),
        (LOCAL, {"host": "[::1"}, "unknown_host"),
        (LOCAL, {"host": "\xff"}, "unknown_host"),
        (LOCAL, {}, "unknown_host"),
        (LOCAL, {"host": "localhost:1", "origin": "http://localhost:1"}, None),
        (LOCAL, {"host": "localhost:1", "origin": "http://localhost:2"}, "unknown_origin"),
        (LOCAL, {"host": "localhost:1", "origin": "https://chat.example.com"}, None),
        (LOCAL, {"host": "localhost:1", "origin": "https://CHAT.example.com"}, None),
        (LOCAL, {"host": "localhost:1", "origin": "http://a:81"}, None),
        (LOCAL, {"host": "localhost:1", "origin": "http://a"}, "unknown_origin"),
        (LOCAL, {"host": "localhost:1", "origin": "null"}, "unknown_origin"),
        (LOCAL, {"host": "localhost:1", "origin": ""}, "unknown_origin"),
        (Origins(), {"host": "any.example", "origin": "https://any.example"}, None),
        (Origins(), {"origin": "null"}, "unknown_origin"),
        (Origins(), {}, None),
        (Origins(allowed=["*"]), {"host": "x", "origin": "https://evil.example"}, None),
        (Origins.for_address("0.0.0.0"), {"host": "llm.example.com"}, None),
        (Origins.for_address("0.0.0.0", ["llm.example.com"]), {"host": "other"}, "unknown_host"),
        (Origins.for_address("127.0.0.1", ["box"]), {"host": "box:80"}, None),
        (Origins.for_address("127.0.0.5"), {"host": "127.0.0.5:80"}, None),
        (Origins.for_address("::1"), {"host": "[::1]:80"}, None),
    ],
)
def test_host_and_origin(origins: Origins, headers: dict[str, str], code: str | None) -> None:
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    if code is None:
        origins.check(sent)
        return
    with pytest.raises(Refused) as caught:
        origins.check(sent)
    assert (caught.value.status, caught.value.code) == (403, code)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.4", False),
        ("example.com", False),
    ],
)
def test_what_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    "origin", ["chat.example.com", "https://", "https://a/b", "ftp://a", "https://*.a", "null", ""]
)
def test_a_wrong_origin_is_an_error(origin: str) -> None:
    with pytest.raises(RequestError, match="allowed origin: expected one such as"):
        Origins(allowed=[origin])


@pytest.mark.parametrize("host", ["http://a", "a:80", "", "*", "a b"])
def test_a_wrong_host_is_an_error(host: str) -> None:
    with pytest.raises(RequestError, match="allowed host: expected a name"):
        Origins([host])


BODY = BodyLimits(
    prompt_chars=100,
    prompts=4,
    messages=3,
    n=2,
    answers=6,
    stop=2,
    stop_chars=10,
    tools=2,
    schema_chars=200,
)
MESSAGE = {"role": "user", "content": "x" * 20}
PARTS = {"role": "user", "content": [{"type": "text", "text": "x" * 60}] * 2}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x" * 101}, "prompt"),
        ({"prompt": ["x" * 60, "x" * 60]}, "prompt"),
        ({"prompt": ["x"] * 5}, "prompt"),
        ({"prompt": [1] * 101}, "prompt"),
        ({"prompt": [[1, 2]] * 5}, "prompt"),
        ({"prompt": "x" * 60, "suffix": "x" * 60}, "suffix"),
        ({"messages": [MESSAGE] * 4}, "messages"),
        ({"messages": [PARTS]}, "messages"),
        ({"input": ["x"] * 5}, "input"),
        ({"input": [PARTS]}, "input"),
        ({"query": "q", "documents": ["x"] * 5}, "documents"),
        ({"prompt": "x", "n": 3}, "n"),
        ({"prompt": "x", "best_of": 10**9}, "best_of"),
        ({"prompt": ["x"] * 4, "n": 2}, "n"),
        ({"prompt": "x", "stop": ["a", "b", "c"]}, "stop"),
        ({"prompt": "x", "stop": "x" * 11}, "stop"),
        ({"prompt": "x", "options": {"stop": ["a", "b", "c"]}}, "stop"),
        ({"prompt": "x", "stop_sequences": ["a", "b", "c"]}, "stop_sequences"),
        ({"prompt": "x", "bad_words": ["x"] * 3}, "bad_words"),
        ({"messages": [], "tools": [{}] * 3}, "tools"),
        ({"messages": [], "tools": [{"a": "x" * 200}]}, "response_format"),
        ({"messages": [], "response_format": {"schema": "x" * 200}}, "response_format"),
        ({"prompt": "x", "guided_regex": "x" * 201}, "response_format"),
    ],
)
def test_too_much_in_a_body_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        BODY.check(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(f"{param}: expected at most ")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "x" * 100, "n": 2, "stop": ["a", "b"]},
        {"prompt": ["x" * 25] * 4, "n": 1},
        {"prompt": [1] * 100},
        {"messages": [MESSAGE] * 3, "tools": [{}, {}]},
        {"input": [{"role": "user", "content": "x"}]},
        # wrong types: the routes name them
        {"prompt": 5, "n": "x", "stop": 7, "tools": {}, "messages": "x", "best_of": 1e9},
        {"prompt": None, "documents": {}, "input": [], "response_format": None},
    ],
)
def test_what_is_within_the_limits_passes(body: dict[str, Any]) -> None:
    BODY.check(body)


def test_wrong_body_limits_are_named() -> None:
    with pytest.raises(RequestError, match="n: expected a whole number of at least 1, found 0"):
        BodyLimits(n=0)
