"""The whole server: routes, keys, limits, quotas and the audit log, over real sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk.serving.app import create_app
from sdk.serving.guard import (
    AuditLog,
    BodyLimits,
    ByKey,
    Edge,
    GuardedAccess,
    HttpLimits,
    KeyFile,
    Limits,
    Meter,
)
from sdk.serving.guard.key_file import add_key
from sdk.serving.guard.keys import KeyHolder, Secret, new_key
from sdk.testing import FakeLLM
from tests.serving.guard.serving import Connection, Reply, ask, post, serving

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


class Server:
    """A protected server with a fake model."""

    def __init__(self, folder: Path, llm: FakeLLM, limits: Limits) -> None:
        self.llm = llm
        self.folder = folder
        self.file = folder / "keys.json"
        add_key(self.file, KeyHolder("nobody"))
        self.audit = AuditLog(folder / "audit.jsonl")
        self.meter = Meter(folder / "usage.jsonl")
        keys = KeyFile(self.file, check_seconds=0.0)
        self.access = GuardedAccess(
            ByKey(file=keys), limits=limits, meter=self.meter, audit=self.audit
        )
        http = HttpLimits(body_bytes=100_000)
        body = BodyLimits(prompt_chars=10_000, n=4)
        app = create_app(llm, access=self.access, max_body_bytes=http.body_bytes, limits=body)
        self.edge = Edge(app, access=self.access, limits=http)
        self._serving = serving(self.edge, http)

    def __enter__(self) -> Server:
        self.port = self._serving.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)
        self.access.close()
        self.llm.close()

    def add(self, name: str, **more: Any) -> str:
        return add_key(self.file, KeyHolder(name, **more))

    def chat(self, key: str, path: str = "/v1/chat/completions", **more: Any) -> Reply:
        body = json.dumps({**CHAT, **more}).encode()
        return ask(self.port, post(body, path, f"Authorization: Bearer {key}"))

    def audited(self) -> list[dict[str, Any]]:
        self.audit.close()
        return [json.loads(line) for line in self.audit.path.read_text().splitlines()]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, FakeLLM("one two three"), Limits()) as made:
        yield made


def test_a_key_opens_the_models_and_only_with_its_role(server: Server) -> None:
    user = server.add("user")
    metrics = server.add("metrics", roles=frozenset(("metrics",)))
    reply = server.chat(user)
    assert reply.status == 200
    assert json.loads(reply.body)["choices"][0]["message"]["content"] == "one two three"
    assert server.chat(metrics).status == 403
    assert server.chat("sk-000000000000-" + "0" * 48).status == 401
    assert ask(server.port, post(json.dumps(CHAT).encode(), "/v1/chat/completions")).status == 401
    models = ask(server.port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert models.status == 401
    health = ask(server.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert health.status == 200
    records = server.audited()
    assert [r.get("name") for r in records if r["event"] == "request"] == ["user"]


def test_limits_and_headers_over_http(server: Server) -> None:
    key = server.add("alice", limits=Limits(requests_per_minute=2, tokens_per_minute=500))
    first = server.chat(key)
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    used = json.loads(first.body)["usage"]["total_tokens"]
    second = server.chat(key)
    reserved = 500 - used - int(second.headers["x-ratelimit-remaining-tokens"])
    assert reserved == json.loads(second.body)["usage"]["prompt_tokens"] + 20
    third = server.chat(key)
    assert (third.status, third.error["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(third.headers["retry-after"]) <= 60
    assert third.headers["x-ratelimit-remaining-tokens"] == str(500 - 2 * used)


def test_a_stream_is_settled_when_it_ends_and_when_its_client_leaves(tmp_path: Path) -> None:
    llm = FakeLLM("word " * 200, seconds_per_token=0.01)
    with Server(tmp_path, llm, Limits(concurrent=1)) as server:
        key = server.add("alice")
        body = json.dumps({**CHAT, "max_tokens": 150, "stream": True}).encode()
        with Connection(server.port) as gone:
            gone.send(post(body, "/v1/chat/completions", f"Authorization: Bearer {key}"))
            assert gone.socket.recv(100).startswith(b"HTTP/1.1 200")
            assert server.chat(key).status == 429  # one at a time
        end = time.monotonic() + 20
        while (reply := server.chat(key)).status == 429:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert reply.status == 200
        records = [r for r in server.audited() if r["event"] == "request"]
    assert [r["outcome"] for r in records] == ["cancelled", "length"]
    assert records[0].get("completion_tokens", 0) < 150
    assert records[1]["completion_tokens"] == 20


def test_a_quota_is_exact_when_many_ask_at_one_time(server: Server) -> None:
    used = json.loads(server.chat(server.add("probe"), max_tokens=2).body)["usage"]
    need = used["prompt_tokens"] + 2
    key = server.add("alice", limits=Limits(tokens_per_day=10 * need + need // 2))
    replies: list[int] = []

    def go() -> None:
        for _ in range(4):
            replies.append(server.chat(key, max_tokens=2).status)

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(replies)) == [200, 429] and replies.count(200) == 10
    journal = [json.loads(x) for x in (server.folder / "usage.jsonl").read_text().splitlines()]
    assert sum(tokens for _, name, tokens in journal if name == "alice") == 10 * need


def test_failed_requests_cost_no_tokens(server: Server) -> None:
    key = server.add("alice", limits=Limits(tokens_per_minute=1000))
    assert server.chat(key, model=3).status == 400
    assert server.chat(key, temperature=-1).status == 400
    left = server.chat(key).headers["x-ratelimit-remaining-tokens"]
    assert int(left) > 900


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"n": 5}, 400),
        ({"messages": [{"role": "user", "content": "x" * 10_001}]}, 400),
        ({"messages": [{"role": "user", "content": "x" * 100_001}]}, 413),
        ({"stop": ["x"] * 17}, 400),
        ({"tools": [{}] * 129}, 400),
        ({"response_format": {"type": "json_schema", "json_schema": {"s": [[]] * 90_000}}}, 413),
        ({"metadata": json.loads("[" * 70 + "]" * 70)}, 400),
    ],
)
def test_oversized_requests(server: Server, change: dict[str, Any], status: int) -> None:
    reply = server.chat(server.add("alice"), **change)
    assert reply.status == status
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b'"x"', b"{}{}", b'{"a": NaN}', b"\xef\xbb\xbf{}"],
)
def test_malformed_bodies(server: Server, body: bytes) -> None:
    key = server.add("alice")
    reply = ask(server.port, post(body, "/v1/chat/completions", f"X-API-Key: {key}"))
    assert reply.status == 400 and reply.error["message"]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/../models", "/v1//chat/completions", "/v1/models/..%2f..%2fx"]
)
def test_path_tricks_find_no_route(server: Server, path: str) -> None:
    key = server.add("alice")
    reply = ask(server.port, f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\n\r\n".encode())
    assert reply.status in (400, 404) and reply.error["message"]


def test_ten_thousand_keys(server: Server) -> None:
    keys = [new_key() for _ in range(10_000)]
    holders = [
        KeyHolder(f"user{i}", secrets=(Secret.of(key, created=0),)).to_json()
        for i, key in enumerate(keys)
    ]
    new = server.folder / "new"
    new.write_text(json.dumps({"version": 1, "holders": holders}))
    new.chmod(0o600)
    new.replace(server.file)
    for index in (0, 5_000, 9_999):
        assert server.chat(keys[index]).status == 200
    names = [r["name"] for r in server.audited() if r["event"] == "request"]
    assert names == ["user0", "user5000", "user9999"]


def test_callers_cannot_reach_the_prefixes_of_others(tmp_path: Path) -> None:
    llm = FakeLLM("one")
    salts: list[Any] = []
    original = llm.astream

    def astream(prompt: Any, params: Any = None, **more: Any) -> Any:
        salts.append(more.get("cache_salt") or prompt)
        return original(prompt, params, **more)

    llm.astream = astream  # type: ignore[method-assign, assignment]
    with Server(tmp_path, llm, Limits()) as server:
        alice, bob = server.add("alice"), server.add("bob")
        for key, more in ((alice, {}), (bob, {}), (bob, {"cache_salt": "alice"})):
            assert server.chat(key, **more).status == 200
    assert len(set(map(str, salts))) == 3 and salts[0] == "alice" and salts[1] == "bob"


@pytest.mark.parametrize("most", [None, 400])
def test_a_quota_counts_what_fits_after_each_prompt(tmp_path: Path, most: int | None) -> None:
    """A long prompt beside short ones leaves room for few tokens after itself alone."""
    limit, length = 600, 512
    with Server(tmp_path, FakeLLM("word " * 600, max_model_len=length), Limits()) as server:
        key = server.add("alice", limits=Limits(tokens_per_minute=limit))
        body: dict[str, Any] = {
            "model": "fake",
            "prompt": ["a " * 500, "a", "a"],
            "max_tokens": most,
        }
        head = f"Authorization: Bearer {key}"
        reply = ask(server.port, post(json.dumps(body).encode(), "/v1/completions", head))
        assert reply.status == 429
        room = length if most is None else most
        assert reply.error["message"].startswith("Request too large: it may use ")
        asked = int(reply.error["message"].split()[6])
        assert asked >= 2 * (room - 2) + length


def test_a_trailing_slash_is_no_route_and_names_no_scheme(server: Server) -> None:
    key = server.add("alice")
    for more in ((), (f"Authorization: Bearer {key}",)):
        reply = ask(server.port, post(json.dumps(CHAT).encode(), "/v1/chat/completions/", *more))
        assert reply.status in (401, 404) and "location" not in reply.headers
    assert reply.status == 404 and reply.error["code"] == "unknown_url"
    text = b"GET /health/ HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert ask(server.port, text).status == 404
