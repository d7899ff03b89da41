"""``AnswerStream``: what ``LLM.astream`` returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import Any

from sdk.outputs import RequestOutput
from sdk.requests.driver import Driver
from sdk.requests.job import Job
from sdk.requests.mailboxes import AsyncMailbox


class AnswerStream(AsyncIterator[RequestOutput]):
    """The answer to one request piece by piece, for ``async for``.

    The request starts with the first piece that is asked for: a stream that is dropped unread
    leaves nothing behind. ``await`` it to have a long prompt, which is read in a thread, checked
    before that; it then returns itself.
    """

    def __init__(self, driver: Driver, request: DeferredJob) -> None:
        self._request = request
        self._pieces = _pieces(driver, request)  # knows nothing of self: no cycle to collect

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> RequestOutput:
        return await self._pieces.__anext__()

    def __await__(self) -> Generator[Any, None, AnswerStream]:
        yield from self._request.made().__await__()
        return self

    async def aclose(self) -> None:
        """Stop; the request is aborted if it runs."""
        await self._pieces.aclose()


class DeferredJob:
    """A request that is made at once where that takes no time, else in a thread when it is needed.

    ``make`` raises what is wrong with it.
    """

    def __init__(self, make: Callable[[], Job], *, at_once: bool) -> None:
        self._make = make
        self._job = make() if at_once else None

    async def made(self) -> Job:
        if self._job is None:
            self._job = await asyncio.to_thread(self._make)
        return self._job


async def _pieces(driver: Driver, request: DeferredJob) -> AsyncGenerator[RequestOutput, None]:
    job = await request.made()
    mailbox = AsyncMailbox()
    driver.submit([job], mailbox)
    finished = False
    try:
        while not finished:
            output = await mailbox.get()
            assert isinstance(output, RequestOutput)
            finished = output.finished
            yield output
    finally:
        if not finished:
            driver.abort([job.request_id])
