"""Responses that later requests go on from: whose they are, and how much memory they take."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from sdk import RequestError
from sdk.serving import Caller, Open, Refused, create_app
from sdk.serving.access import Client as Peer, Headers
from sdk.serving.kept_responses import KeptResponses
from sdk.testing import FakeAnswer, FakeLLM
from tests.serving.serving import Serve, running

URL = "/v1/responses"
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_goes_on_from_a_response(serve: Serve, stream: bool) -> None:
    client, llm = serve(["Ann.", FakeAnswer("", tool_calls=[("now", {})]), "Noon.", "Ann!"])

    def ask(text: Any, previous: str | None = None, **more: Any) -> dict[str, Any]:
        body = {"input": text, "previous_response_id": previous, "stream": stream, **more}
        found = client.post(URL, body)
        assert found.status == 200, found.body
        response: dict[str, Any] = found.events[-1]["response"] if stream else found.json
        assert response["previous_response_id"] == previous and response["store"] is True
        return response

    first = ask("Who are you?", instructions="Be brief.")
    second = ask("What time is it?", first["id"], tools=[TOOL], instructions="Be exact.")
    [call] = [item for item in second["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"}
    ask([result], second["id"], tools=[TOOL])
    assert [message["role"] for message in llm.requests[1].prompt] == [
        *("system", "user", "assistant", "user")
    ]
    *earlier, answer, tool = llm.requests[2].prompt  # without the instructions of the others
    assert [message["content"] for message in earlier] == [
        *("Who are you?", [{"type": "text", "text": "Ann."}], "What time is it?")
    ]
    assert answer["tool_calls"][0]["id"] == tool["tool_call_id"] == call["call_id"]
    ask("And again?", first["id"])  # a response may be continued twice
    assert len(llm.requests[3].prompt) == 3
    assert client.get(f"{URL}/{second['id']}").json == second
    gone = client.send("DELETE", f"{URL}/{second['id']}")
    assert gone.json == {"id": second["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        found = client.send(method, f"{URL}/{second['id']}")
        assert found.status == 404 and found.error["code"] == "response_not_found"
    body = {"input": "x", "previous_response_id": second["id"]}
    found = client.post(URL, body)
    assert found.status == 400 and found.error["code"] == "previous_response_not_found"


def test_nothing_is_kept_that_shall_not_be(serve: Serve) -> None:
    client, _ = serve(["a", FakeAnswer("b", error=ValueError("NaN"))])
    found = client.post(URL, {"input": "x", "store": False}).json
    assert found["store"] is False and client.get(f"{URL}/{found['id']}").status == 404
    events = client.post(URL, {"input": "x", "stream": True}).events
    failed = events[0]["response"]["id"]
    assert client.get(f"{URL}/{failed}").status == 404
    client, _ = serve("a", app={"max_kept_bytes": 0})
    found = client.post(URL, {"input": "x", "store": True}).json
    assert found["store"] is False
    missing = client.get(f"{URL}/{found['id']}")
    assert "this server keeps no responses" in missing.error["message"]


def test_callers_see_only_their_own() -> None:
    class Two(Open):
        async def enter(self, headers: Headers, client: Peer) -> Caller:
            return Caller(dict(headers)[b"authorization"].decode())

    with FakeLLM("x") as llm, running(create_app(llm, access=Two())) as client:
        ann, bob = ({"Authorization": name} for name in ("ann", "bob"))
        made = client.post(URL, {"input": "a"}, headers=ann).json["id"]
        for method in ("GET", "DELETE"):
            assert client.send(method, f"{URL}/{made}", headers=bob).status == 404
        body = {"input": "b", "previous_response_id": made}
        assert client.post(URL, body, headers=bob).status == 400
        assert client.post(URL, body, headers=ann).status == 200
        assert client.get(f"{URL}/{made}", headers=ann).status == 200


def response(number: int, size: int = 1000) -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": "x" * size}


def test_the_oldest_of_the_largest_caller_goes_first() -> None:
    kept = KeptResponses(10_000)
    ann, bob = Caller("ann"), Caller("bob")
    kept.keep(bob, response(0), [])
    for number in range(1, 50):
        kept.keep(ann, response(number), [{"role": "user", "content": "y"}])
        assert kept.nbytes <= kept.max_bytes
    assert kept.response(bob, "resp_0")["output"] == "x" * 1000
    assert kept.response(ann, "resp_49")["id"] == "resp_49"
    with pytest.raises(Refused):
        kept.response(ann, "resp_1")
    kept.keep(ann, response(50, 20_000), [])  # more than everything may be
    assert kept.response(ann, "resp_49")
    with pytest.raises(Refused):
        kept.response(ann, "resp_50")
    for caller in (ann, bob):
        for response_id in list(kept._owned[caller.name, None]):
            kept.forget(caller, response_id)
    assert kept.nbytes == 0 and not kept._owned and not kept._sizes


def test_the_bytes_that_are_counted_are_those_in_memory() -> None:
    limit = 2**20
    tracemalloc.start()
    try:
        kept = KeptResponses(limit)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20_000):
            made = response(number, 50)
            kept.keep(Caller(f"c{number % 300}"), made, [{"role": "user", "content": "a" * 40}])
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept.nbytes > 0.99 * limit and used < 1.2 * limit


@pytest.mark.parametrize("wrong", [-1, True, "1MiB", 1.5])
def test_the_limit_is_a_number(wrong: Any) -> None:
    with FakeLLM("x") as llm, pytest.raises(RequestError, match="max_kept_bytes: expected"):
        create_app(llm, max_kept_bytes=wrong)


def test_what_is_kept_is_json() -> None:
    kept = KeptResponses()
    kept.keep(Caller(), {"id": "r", "output": "\ud800 ü"}, [{"content": "ü"}])
    assert kept.conversation(Caller(), "r") == [{"content": "ü"}]
    assert json.dumps(kept.response(Caller(), "r")) == '{"id": "r", "output": "? \\u00fc"}'
