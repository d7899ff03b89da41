"""The live view, and the stream of states behind it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import expect

from sdk.api.params import SamplingParams
from sdk.serving import Caller, Open
from sdk.serving.access import Client, Headers
from sdk.serving.live import MAX_REQUESTS, MAX_VIEWERS
from sdk.testing import FakeLLM
from tests.serving.page.conftest import Served, Visitor, wait_until

Serve = Callable[..., Served]
Visit = Callable[..., Visitor]

LONG = " ".join(f"word{i}" for i in range(3000))


class NoMetrics(Open):
    async def enter(self, headers: Headers, client: Client) -> Caller:
        return Caller("somebody", roles=frozenset({"user"}))


@contextmanager
def running(llm: FakeLLM, count: int, **params: Any) -> Iterator[None]:
    """This many requests that run or wait."""
    streams = [llm.stream("a b c", SamplingParams(**params)) for _ in range(count)]
    threads = [threading.Thread(target=lambda one=one: next(one)) for one in streams]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(llm.list_requests()) == count)
        yield
    finally:
        for thread in threads:
            thread.join()
        for stream in streams:
            stream.close()


@contextmanager
def look(served: Served, path: str = "/live") -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("GET", path)
    response = connection.getresponse()
    try:
        yield response
    finally:
        response.close()
        connection.close()


def state_of(response: http.client.HTTPResponse) -> dict[str, Any]:
    line = response.readline()
    assert line.startswith(b"data: "), line
    assert response.readline() == b"\n"
    found: dict[str, Any] = json.loads(line[6:])
    return found


def test_a_state_has_metrics_requests_and_no_texts(serve: Serve) -> None:
    llm = FakeLLM(LONG, seconds_per_token=0.02)
    served = serve({"tiny": llm, "closed": closed()})
    with running(llm, 3, tenant="acme"), look(served) as response:
        assert response.status == 200
        assert response.getheader("content-type", "").startswith("text/event-stream")
        first, second = state_of(response), state_of(response)
        assert second["time"] > first["time"]
        tiny, other = second["models"]
        assert (tiny["name"], tiny["state"], tiny["more"]) == ("tiny", "ready", 0)
        assert tiny["metrics"].keys() == llm.get_metrics().keys()
        assert tiny["metrics"]["num_running"] == 3
        assert [one["state"] for one in tiny["requests"]] == ["decoding"] * 3
        [request, *_] = tiny["requests"]
        assert request["tenant"] == "acme" and request["prompt_tokens"] == 3
        assert request["generated_tokens"] > 0 and sum(request["pages"].values()) > 0
        assert "word" not in json.dumps(second)
        assert (other["requests"], other["metrics"]) == ([], {})
        assert "closed" in other["state"]
    wait_until(lambda: served.app.state.live.viewers == 0)


def closed() -> FakeLLM:
    llm = FakeLLM()
    llm.close()
    return llm


def test_long_lists_are_cut_and_states_are_shared(serve: Serve) -> None:
    llm = FakeLLM(LONG, seconds_per_token=0.05, max_num_seqs=MAX_REQUESTS + 20)
    served = serve({"tiny": llm})
    llm.enqueue(["a"] * (MAX_REQUESTS + 5))
    llm.step()
    with look(served) as response:
        [model] = state_of(response)["models"]
    assert (len(model["requests"]), model["more"]) == (MAX_REQUESTS, 5)
    now = [0.0]
    live = served.app.state.live
    live._clock = lambda: now[0]
    live._made = -1.0
    event = live.event()
    assert live.event() is event  # another viewer, at the same moment
    now[0] += 0.5
    assert live.event() is not event


def test_it_needs_a_role_and_is_not_there_without_the_page(serve: Serve) -> None:
    with look(serve({"tiny": FakeLLM()}, access=NoMetrics())) as response:
        assert response.status == 403
        assert json.loads(response.read())["error"]["type"] == "permission_error"
    with look(serve({"tiny": FakeLLM()}, page=False)) as response:
        assert response.status == 404


def test_viewers_are_limited_and_a_closing_server_ends_their_streams(serve: Serve) -> None:
    served = serve({"tiny": FakeLLM()})
    live = served.app.state.live
    with look(served) as response:
        state_of(response)
        live.viewers = MAX_VIEWERS
        with look(served) as other:
            assert other.status == 429
            assert other.getheader("retry-after") == "10"
        live.viewers = 1
        served.call(live.close)
        rest = response.read()  # ends
        assert rest.count(b"data: ") <= 1
    with look(served) as response:
        assert response.status == 503


def test_the_page_shows_what_runs_and_what_happened(serve: Serve, visit: Visit) -> None:
    llm = FakeLLM(LONG, seconds_per_token=0.02)
    served = serve({"tiny": llm})
    visitor = visit(served.address)
    page = visitor.page
    live = served.app.state.live
    visitor.ask("Hello")
    page.get_by_role("article", name="Answer of tiny").get_by_text("word3").wait_for()
    assert live.viewers == 0  # nobody looks
    page.get_by_role("link", name="Live").click()
    expect(tile(page, "Running")).to_have_text("1")
    expect(page.get_by_role("img", name="Running: now 1, lowest 1, highest 1")).to_be_visible()
    table = page.get_by_role("region", name="Requests", exact=True)
    expect(table.get_by_role("row")).to_have_count(2)
    expect(table).to_contain_text("decoding")
    table.get_by_role("button").click()
    timeline = page.locator(".timeline")
    expect(timeline).to_contain_text("decoding")
    assert live.viewers == 1
    page.get_by_role("button", name="Pause").click()
    wait_until(lambda: live.viewers == 0)
    page.get_by_role("button", name="Resume").click()
    # the chat goes on meanwhile; when it ends, the engine's own timeline is shown
    page.get_by_role("link", name="Chat").click()
    wait_until(lambda: live.viewers == 0)
    page.get_by_role("button", name="Stop").click()
    visitor.ask("word " * 20)
    second = page.get_by_role("article", name="Answer of tiny").nth(1)
    second.get_by_text("word3").wait_for()  # it runs, so it will have ended
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_text("No request runs or waits.")).to_be_visible()
    ended = page.get_by_role("region", name="Requests that ended last")
    expect(ended.get_by_role("row")).to_have_count(3)
    expect(timeline).to_contain_text("queued with a prompt of 4 tokens")
    expect(timeline).to_contain_text("first token")


def tile(page: Any, name: str) -> Any:
    return page.locator(".tile", has_text=name).locator("dd").first


@pytest.mark.slow
def test_a_hidden_page_costs_the_server_nothing(serve: Serve, visit: Visit) -> None:
    served = serve({"tiny": FakeLLM()})
    page = visit(served.address, "#live").page
    live = served.app.state.live
    wait_until(lambda: live.viewers == 1)
    hide = """(hidden) => {
      Object.defineProperty(document, 'hidden', {configurable: true, get: () => hidden});
      document.dispatchEvent(new Event('visibilitychange', {bubbles: true}));
    }"""
    page.evaluate(hide, True)
    wait_until(lambda: live.viewers == 0)
    page.evaluate(hide, False)
    wait_until(lambda: live.viewers == 1)


@pytest.mark.slow
def test_several_models_and_one_that_cannot_be_used(serve: Serve, visit: Visit) -> None:
    page = visit(serve({"one": FakeLLM(), "two": closed()}).address, "#live").page
    choice = page.get_by_label("Model shown")
    expect(tile(page, "Running")).to_have_text("0")
    choice.select_option("two")
    expect(page.get_by_text("two: ")).to_be_visible()
    expect(page.locator(".tiles")).to_be_hidden()
    choice.select_option("one")
    expect(page.locator(".tiles")).to_be_visible()
