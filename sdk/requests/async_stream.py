"""``AnswerStream``: the result of ``LLM.astream``."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any

from sdk.api.outputs import RequestOutput
from sdk.engine.job import Job
from sdk.requests.driving.job_driver import JobDriver
from sdk.requests.driving.mailboxes import AsyncMailbox

if TYPE_CHECKING:
    from sdk.requests.answer_formats import Formatter


class AnswerStream(AsyncIterator[RequestOutput]):
    """The answer to one request piece by piece, for ``async for``.

    The request starts when the first piece is requested, so a stream that is dropped unread leaves
    nothing behind. ``await`` the stream to have a long prompt tokenized in a thread and checked
    before that; this returns the stream.
    """

    def __init__(self, driver: JobDriver, request: DeferredJob) -> None:
        self._request = request
        self._batches = _batches(driver, request)  # has no reference to self: no cycle to collect
        self._ready: deque[RequestOutput] = deque()

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._ready:
            self._ready.extend(await self._batches.__anext__())
        return self._ready.popleft()

    def __await__(self) -> Generator[Any, None, AnswerStream]:
        yield from self._request.made().__await__()
        return self

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt, once the stream has been awaited or read.

        :raises RuntimeError: a long prompt has not been tokenized yet.
        """
        return self._request.job.prompt_token_ids

    async def aclose(self) -> None:
        """Stop; a running request is aborted."""
        await self._batches.aclose()


class DeferredJob:
    """A job and its formatter, made right away if that is quick, otherwise in a thread when needed.

    ``make`` raises if the request is invalid.
    """

    def __init__(self, make: Callable[[], tuple[Job, Formatter]], *, at_once: bool) -> None:
        self._make = make
        self._job = make() if at_once else None

    @property
    def job(self) -> Job:
        """:raises RuntimeError: it has not been made yet."""
        if self._job is None:
            raise RuntimeError("the prompt was not tokenized yet: await the stream first")
        return self._job[0]

    async def made(self) -> tuple[Job, Formatter]:
        if self._job is None:
            import asyncio  # see LoopInboxes.current

            self._job = await asyncio.to_thread(self._make)
        return self._job


async def _batches(
    driver: JobDriver, request: DeferredJob
) -> AsyncGenerator[list[RequestOutput], None]:
    job, formatter = await request.made()
    mailbox = AsyncMailbox(driver.loop_inbox())
    driver.submit([job], mailbox)
    finished = False
    try:
        while not finished:
            outputs = [await mailbox.get(), *mailbox.get_more()]
            finished = outputs[-1].finished
            yield [formatter(output) for output in outputs if isinstance(output, RequestOutput)]
    finally:
        if not finished:
            driver.abort([job.request_id])
