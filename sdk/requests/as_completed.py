"""``AsCompleted``: the result of ``LLM.as_completed``, for ``for`` and for ``async for``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sdk.api.outputs import RequestOutput
from sdk.engine.engine import Output
from sdk.engine.job import Job
from sdk.requests.driving.job_driver import JobDriver
from sdk.requests.driving.mailboxes import AsyncMailbox, Mailbox

if TYPE_CHECKING:
    from sdk.requests.answer_formats import Formatter

#: ``RequestOutput``, or what ``returns=`` or ``tools=`` make of it.
Answer = TypeVar("Answer")


class AsCompleted(Generic[Answer]):
    """Pairs of a prompt's index and its last output, in the order in which answers end.

    Prompts are read a few ahead of the answers, so they may come from a file that is longer than
    memory; a source that waits for its next prompt holds answers back. Iterate once. Leaving the
    loop early aborts the requests that have not ended.
    """

    def __init__(
        self,
        driver: JobDriver,
        prompts: Iterable[Any],
        make: Callable[[int, Any], tuple[Job, Formatter]],
        amake: Callable[[int, Any], Awaitable[tuple[Job, Formatter]]],
        *,
        ahead: int,
        before: Callable[[], object],
    ) -> None:
        """``make``: the request of a prompt; ``amake``: the same for an event loop. ``ahead``: how
        many are with the engine at a time. ``before``: called when a ``for`` begins."""
        self._driver = driver
        self._prompts = enumerate(prompts)
        self._make = make
        self._amake = amake
        self._ahead = ahead
        self._before = before

    def __iter__(self) -> Iterator[tuple[int, Answer]]:
        self._before()
        return self._in_thread()

    def __aiter__(self) -> AsyncIterator[tuple[int, Answer]]:
        return self._in_loop()

    # In both, an answer that is ready goes before the next prompt, whose reading may take long.

    def _in_thread(self) -> Iterator[tuple[int, Answer]]:
        running, mailbox = _Running(), Mailbox()
        try:
            while True:
                while len(running) < self._ahead and (item := next(self._prompts, None)):
                    job = running.add(item[0], *self._make(*item))
                    self._driver.submit([job], mailbox, goes_on=item[0] > 0)
                    if mailbox.has_some:
                        break
                if not running:
                    return
                output = mailbox.get()
                if output.finished:
                    yield running.ended(output)
        finally:
            self._driver.abort(running)

    async def _in_loop(self) -> AsyncIterator[tuple[int, Answer]]:
        running, mailbox = _Running(), AsyncMailbox(self._driver.loop_inbox())
        try:
            while True:
                while len(running) < self._ahead and (item := next(self._prompts, None)):
                    job = running.add(item[0], *await self._amake(*item))
                    self._driver.submit([job], mailbox, goes_on=item[0] > 0)
                    if mailbox.has_some:
                        break
                if not running:
                    return
                output = await mailbox.get()
                if output.finished:
                    yield running.ended(output)
        finally:
            self._driver.abort(running)


class _Running(dict[str, "tuple[int, Formatter]"]):
    """The requests that have not ended, by id: their index, and how their outputs are shown."""

    def add(self, index: int, job: Job, formatter: Formatter) -> Job:
        self[job.request_id] = index, formatter
        return job

    def ended(self, output: Output) -> tuple[int, Any]:
        """The pair of a request that has ended."""
        index, formatter = self.pop(output.request_id)
        assert isinstance(output, RequestOutput)
        return index, formatter(output)
