"""The programs of docs/examples run, with a real model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.server.serving import running

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_a_host_serves_its_own_route_and_openai_s(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", str(smollm2))
    spec = importlib.util.spec_from_file_location("host", EXAMPLES / "host.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with running(module.app) as client:
        found = client.post("/summary", {"text": "It rained all day, so we stayed at home."})
        assert found.status == 200 and found.json["summary"]
        assert client.post("/summary", {}).status == 422  # the host's own shape
        messages = [{"role": "user", "content": "Say hello."}]
        asked = {"model": "assistant", "messages": messages, "max_tokens": 4, "temperature": 0}
        whole = client.post("/v1/chat/completions", asked).json["choices"][0]["message"]["content"]
        events = client.post("/v1/chat/completions", {**asked, "stream": True}).events
        pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        assert whole and "".join(pieces) == whole
