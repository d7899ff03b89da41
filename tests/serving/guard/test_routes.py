"""Every route of an app is protected: found by walking its routes, so that none is forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sdk.serving.app import create_app
from sdk.serving.guard import AuditLog, ByKey, GuardedAccess, HttpLimits, Limits, Origins, protected
from sdk.serving.interfaces import ANTHROPIC, OLLAMA, interface_of
from sdk.testing import FakeLLM
from tests.serving.guard.serving import Reply, ask, serving

ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
#: What a route is asked with, and whether that uses tokens. With and without /v1 it is the same.
BODIES: dict[str, tuple[dict[str, Any], bool]] = {
    "/chat/completions": (ASK, True),
    "/completions": ({"prompt": "Hi", "max_tokens": 5}, True),
    "/responses": ({"input": "Hi you", "max_output_tokens": 5}, True),
    "/messages": (ASK, True),
    "/messages/count_tokens": (ASK, False),
    "/embeddings": ({"input": "Hi you"}, True),
    "/pooling": ({"input": "Hi you", "task": "embed"}, True),
    "/classify": ({"input": "Hi you"}, True),
    "/rerank": ({"query": "a", "documents": ["b"]}, True),
    "/score": ({"text_1": "a", "text_2": "b"}, True),
    "/tokenize": ({"prompt": "Hi"}, False),
    "/detokenize": ({"tokens": []}, False),
    "/api/chat": (ASK | {"options": {"num_predict": 5}}, True),
    "/api/generate": ({"prompt": "Hi", "options": {"num_predict": 5}}, True),
    "/api/embed": ({"input": "Hi you"}, True),
    "/api/embeddings": ({"prompt": "Hi you"}, True),
    "/api/show": ({}, False),
    **{f"/api/{name}": ({}, False) for name in ("pull", "push", "create", "copy", "delete")},
    "/api/blobs/{digest}": ({}, False),
    "/responses/{response_id}": ({}, False),
}
del BODIES["/api/chat"][0]["max_tokens"]
#: Anybody may ask these: probes, and the files of the page.
OPEN = {"/health", "/ready", "/", "/page/{path:path}"}
KEY = "key-of-the-user"
MOST_BYTES = 3000


def routes(app: Any) -> list[tuple[str, str]]:
    """The methods and paths of an app."""
    found = [
        (method, route.path)
        for route in app.router.routes
        for method in sorted(route.methods - {"HEAD"})
    ]
    assert len(found) > 40
    return found


def body_of(path: str) -> tuple[dict[str, Any], bool]:
    for prefix in ("/v1", "/v2", ""):
        if path.startswith(prefix) and path.removeprefix(prefix) in BODIES:
            return BODIES[path.removeprefix(prefix)]
    raise AssertionError(f"{path}: say in BODIES what it is asked with")


@dataclass
class Server:
    app: Any
    llm: FakeLLM
    port: int
    audit: Path

    def send(
        self, method: str, path: str, body: bytes = b"", key: str = "", host: str = "localhost"
    ) -> Reply:
        path = path.replace("{response_id}", "resp_1").replace("{digest}", "sha256:0")
        path = path.replace("{model:path}", "fake").replace("{path:path}", "page.js")
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json", "Connection: close"]
        lines += [f"x-api-key: {key}"] if key else []
        return ask(self.port, "\r\n".join([*lines, "", ""]).encode() + body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("routes")
    audit = AuditLog(folder / "audit.jsonl")
    access = GuardedAccess(ByKey([KEY]), audit=audit)
    yield from _served(folder, audit, access)


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("poor")
    audit = AuditLog(folder / "audit.jsonl")
    access = GuardedAccess(ByKey([KEY]), limits=Limits(tokens_per_day=1), audit=audit)
    yield from _served(folder, audit, access)


def _served(folder: Path, audit: AuditLog, access: GuardedAccess) -> Iterator[Server]:
    http = HttpLimits(body_bytes=MOST_BYTES)
    with FakeLLM("one two three") as llm:
        app = create_app(llm, access=access, max_body_bytes=MOST_BYTES, page=True)
        whole = protected(app, access=access, limits=http, origins=Origins.for_address("127.0.0.1"))
        with serving(whole, http) as port:
            yield Server(app, llm, port, folder / "audit.jsonl")
        access.close()


def message_of(path: str, reply: Reply) -> str:
    """The message of an error, which has the shape of the path's API."""
    value = json.loads(reply.body)
    interface = interface_of(path)
    if interface is OLLAMA:
        assert list(value) == ["error"] and isinstance(value["error"], str)
        return str(value["error"])
    if interface is ANTHROPIC:
        assert list(value) == ["type", "error"] and set(value["error"]) == {"type", "message"}
    else:
        assert set(value["error"]) == {"message", "type", "param", "code"}
    return str(value["error"]["message"])


def test_nobody_comes_in_without_a_key(server: Server) -> None:
    for method, path in routes(server.app):
        reply = server.send(method, path, b"{}" if method == "POST" else b"")
        if path in OPEN:
            assert reply.status in (200, 404), path
            continue
        assert reply.status == 401, (method, path)
        assert "No API key" in message_of(path, reply)
        wrong = server.send(method, path, b"{}", key="sk-wrong")
        assert wrong.status == 401 and "Incorrect" in message_of(path, wrong)


def test_bodies_are_limited_and_names_of_the_host_are_checked(server: Server) -> None:
    for method, path in routes(server.app):
        if method in ("POST", "DELETE"):
            reply = server.send(method, path, b" " * (MOST_BYTES + 1), KEY)
            assert reply.status == 413, (method, path)
            assert "larger than" in message_of(path, reply)
        reply = server.send(method, path, b"{}", KEY, host="rebound.example")
        assert reply.status == 403 and "Host" in message_of(path, reply), (method, path)


def test_what_uses_tokens_is_counted_and_recorded(server: Server) -> None:
    records: list[dict[str, Any]] = []
    for method, path in routes(server.app):
        if method != "POST":
            continue
        body, uses = body_of(path)
        reply = server.send(method, path, json.dumps(body).encode(), KEY)
        refused = path.startswith("/api/") and reply.status == 501
        # a fake model has no classes: the error comes after the admission
        assert reply.status == (400 if path == "/classify" else 200) or refused, reply.body
        if uses:
            records.append({"path": path, "status": reply.status})
    written = [json.loads(line) for line in server.audit.read_text().splitlines()]
    found = [one for one in written if one["event"] == "request"]
    assert [one["status"] for one in found] == [one["status"] for one in records]
    assert all(one["prompt_tokens"] > 0 and one["name"] == "key" for one in found)


def test_quotas_hold_for_all_that_uses_tokens(poor: Server) -> None:
    for method, path in routes(poor.app):
        if method != "POST":
            continue
        body, uses = body_of(path)
        if not uses:
            continue
        reply = poor.send(method, path, json.dumps(body).encode(), KEY)
        assert reply.status == 429, (path, reply.body)
        assert "tokens per day" in message_of(path, reply)
    assert poor.llm.get_metrics()["num_finished"] == 0
