"""Which names of models requests may use, and which ones they read."""

from __future__ import annotations

from typing import Any

import pytest

from sdk import RequestError
from sdk.serving import create_app
from sdk.serving.models import Models
from sdk.testing import FakeLLM
from tests.serving.serving import Serve, running

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_single_model_answers_to_any_name(serve: Serve) -> None:
    """Clients come with the name of the model that they were written for."""
    client, _ = serve("x")
    for path, body in (
        (CHAT, ASK),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/api/chat", {**ASK, "stream": False}),
    ):
        found = client.post(path, {**body, "model": "gpt-4o"})
        assert found.status == 200, found.body
        assert found.json["model"] == "tiny"
    assert client.get("/v1/models/gpt-4o").status == 404
    with_stream = client.post(CHAT, {**ASK, "model": "gpt-4o", "stream": True})
    assert {event["model"] for event in with_stream.events[:-1]} == {"tiny"}


def test_a_model_with_adapters_answers_to_their_names_and_its_own() -> None:
    """A misspelled adapter must not be answered by the model without it."""
    with FakeLLM("x") as llm, running(create_app(llm, model_name="base")) as client:
        assert client.post(CHAT, {**ASK, "model": "slq"}).status == 200
        llm.add_lora("sql", "/none")
        assert client.post(CHAT, {**ASK, "model": "slq"}).status == 404
        assert client.post(CHAT, {**ASK, "model": "sql"}).json["model"] == "sql"
        assert client.post(CHAT, {**ASK, "model": "base"}).json["model"] == "base"


@pytest.mark.parametrize("how", ["names", "mapping"])
def test_aliases_are_listed_and_answered_with_the_first_name(how: str) -> None:
    with FakeLLM("x") as llm:
        named = create_app(llm, model_name=["a", "b"])
        app = named if how == "names" else create_app({"a": llm, "b": llm})
        with running(app) as client:
            cards = client.get("/v1/models").json["data"]
            assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
                ("a", "a", None),
                ("b", "a", None),
            ]
            assert client.get("/v1/models/b").json["id"] == "b"
            assert client.post(CHAT, {**ASK, "model": "b"}).json["model"] == "a"
            assert list(client.get("/ready").json["models"]) == ["a"]  # there is one
            assert client.get("/metrics").body.count(b"embedlm:num_requests_running{") == 1


@pytest.mark.parametrize("names", [[], ["a", "a"], "", [3]])
def test_names_are_different_texts(names: Any) -> None:
    with FakeLLM("x") as llm, pytest.raises(RequestError, match="model"):
        Models(llm, names)
