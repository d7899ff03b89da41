"""The load generator: sends sessions to a target, in an open or a closed loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from sdk.bench.serve.record import Record
from sdk.bench.serve.workload import Message, Session, prompt_of

Prompt = str | list[Message]


class RequestFailed(Exception):
    """A request failed. ``kind``: in a few words, the same for all such failures; ``detail``: what
    the engine said about this one."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class Target(Protocol):
    """What answers requests: an engine in this process, or a server."""

    async def ask(self, prompt: Prompt, output_len: int, record: Record) -> None:
        """Send one request and note the pieces of its answer in ``record``.

        Sets ``record.sent``, the numbers of tokens and, where known, ``queue_s``.

        :raises RequestFailed: there is no complete answer.
        """
        ...


class LoadGenerator:
    """Sends sessions to a target.

    ``records``: the requests that ended, also failed ones; ``details``: the first message of each
    kind of failure.

    ``chat``: as conversations, not as plain text. ``timeout_s``: for each request, from when it was
    due. ``clock`` is that of the event loop. ``progress`` is called with the number of ended
    requests.
    """

    def __init__(
        self,
        target: Target,
        *,
        chat: bool = False,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.records: list[Record] = []
        self.details: dict[str, str] = {}
        self._target = target
        self._chat = chat
        self._timeout_s = timeout_s
        self._clock = clock
        self._progress = progress

    async def open_loop(self, sessions: Sequence[Session], most: int | None = None) -> None:
        """Start every session when it is due, whether or not others have ended.

        At most ``most`` requests run at a time; the others wait, which counts as latency.
        """
        slots = asyncio.Semaphore(most) if most else None
        begin = self._clock()
        tasks = []
        try:
            for session in sorted(sessions, key=lambda one: one.at):
                due = begin + session.at
                # sleep(0) at least: a burst must not keep the loop from reading answers.
                await asyncio.sleep(max(0.0, due - self._clock()))
                tasks.append(asyncio.create_task(self._session(session, due, slots)))
            await asyncio.gather(*tasks)
        finally:
            await _cancelled(tasks)

    async def closed_loop(
        self, sessions: Iterator[Session], concurrency: int, seconds: float | None = None
    ) -> None:
        """``concurrency`` callers, each of which starts a session when its last one has ended.

        After ``seconds`` no new session starts.
        """
        end = None if seconds is None else self._clock() + seconds
        callers = [asyncio.create_task(self._caller(sessions, end)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*callers)
        finally:
            await _cancelled(callers)

    async def _caller(self, sessions: Iterator[Session], end: float | None) -> None:
        for session in sessions:
            if end is not None and self._clock() >= end:
                return
            await self._session(session, self._clock(), None)

    async def _session(self, session: Session, due: float, slots: asyncio.Semaphore | None) -> None:
        history = list(session.opening)
        for number, turn in enumerate(session.turns):
            if number:
                due = self._clock() + session.think_s
                await asyncio.sleep(session.think_s)
            history.append({"role": "user", "content": str(turn.text)})
            prompt = prompt_of(history, chat=self._chat)
            record = Record(due)
            await self._request(prompt, turn.output_len, record, slots)
            if record.error is not None:
                return  # the next turn would have no answer to refer to
            history.append({"role": "assistant", "content": record.answer})

    async def _request(
        self, prompt: Prompt, output_len: int, record: Record, slots: asyncio.Semaphore | None
    ) -> None:
        async def ask() -> None:
            if slots is None:
                await self._target.ask(prompt, output_len, record)
                return
            async with slots:
                await self._target.ask(prompt, output_len, record)

        left = record.due + self._timeout_s - self._clock()
        try:
            await asyncio.wait_for(ask(), left)
            record.end(self._clock())
        except RequestFailed as error:
            record.error = error.kind
            self.details.setdefault(error.kind, str(error))
        except asyncio.TimeoutError:
            record.error = "timeout"
        if record.error is not None:
            record.last = self._clock()
        self.records.append(record)
        self._progress(len(self.records))


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks that have not ended, and wait until they have closed what they use."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
