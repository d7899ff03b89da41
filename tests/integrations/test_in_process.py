"""sdk/integrations/in_process.py: requests to an application in this process, without a socket."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sdk.integrations.in_process import ADDRESS, Exchange, LoopThread, Request, TimedOut
from sdk.integrations.vectors import Vectors
from sdk.testing import FakeLLM

ASK = Request("GET", f"{ADDRESS}/x", [], b"")


class Application:
    """Sends the head of a response and two pieces, then waits to be cancelled."""

    def __init__(self, head: bool = True) -> None:
        self.head, self.ended = head, threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            if self.head:
                await send({"type": "http.response.start", "status": 200})
                await send({"type": "http.response.body", "body": b"a"})
                await send({"type": "http.response.body", "body": b"b"})
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def test_an_event_loop_that_nothing_refers_to_ends_its_thread() -> None:
    def threads() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "sdk-in-process"]

    before = threads()
    loop = LoopThread()

    async def work() -> int:
        return 7

    assert loop.run(work()) == 7
    [thread] = [one for one in threads() if one not in before]
    del loop
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    closed = LoopThread()
    closed.close()
    closed.close()  # again: nothing
    assert threads() == before


async def _nothing_comes(app: Any) -> None:
    await Exchange(app, ASK, 0.01).start()


async def _no_more_comes(app: Any) -> None:
    exchange = Exchange(app, ASK, 0.5)
    assert await exchange.start() == (200, [])
    found = [piece async for piece in exchange.pieces()]
    raise AssertionError(found)


@pytest.mark.parametrize(("head", "use"), [(False, _nothing_comes), (True, _no_more_comes)])
def test_a_response_that_takes_too_long_is_an_error_and_ends_its_request(
    head: bool, use: Callable[..., Any]
) -> None:
    app = Application(head)
    with pytest.raises(TimedOut, match=r"no answer, or no more of it, within 0\.\d+ s"):
        asyncio.run(use(app))
    assert app.ended.is_set()


def test_a_reader_leaves_from_any_thread_and_its_request_ends() -> None:
    app, loop = Application(), LoopThread()
    exchange = Exchange(app, ASK)
    assert loop.run(exchange.start()) == (200, [])
    assert not app.ended.is_set()
    exchange.leave()
    assert app.ended.wait(10)
    loop.close()
    exchange.leave()  # after its event loop has ended: nothing


def test_requests_are_cancelled_when_their_event_loop_ends() -> None:
    app, loop = Application(), LoopThread()
    exchange = Exchange(app, ASK)
    assert loop.run(exchange.start()) == (200, [])
    exchange.leave()  # the loop may stop before the task has seen this
    loop.close()
    assert app.ended.is_set() and exchange._task.cancelled()
    exchange.close_from(loop)  # again: nothing


def test_a_path_in_the_place_of_a_model_is_named() -> None:
    with pytest.raises(TypeError, match=r"llm: expected an open sdk\.LLM, found 'model\.gguf'"):
        Vectors("model.gguf")  # type: ignore[arg-type]
    with FakeLLM("x") as fake:
        assert Vectors(fake).of_documents([]) == []
