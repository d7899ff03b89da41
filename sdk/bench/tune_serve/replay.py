"""A load replayed on an engine that is stepped by hand, in time that its steps take.

Nothing waits between requests: if the engine is idle, time jumps to the next arrival. So a run
takes only as long as its steps, and the load generator takes no time from the engine.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sdk.api.errors import SdkError
from sdk.api.outputs import RequestOutput
from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.bench.serve.record import Record
from sdk.bench.serve.workload import Message, Session, prompt_of


class Stepped(Protocol):
    """What a replay needs of an ``LLM``."""

    def enqueue(self, prompts: Any, sampling_params: Any = None) -> list[str]: ...
    def step(self) -> list[RequestOutput]: ...
    def abort(self, request_id: str | Sequence[str]) -> None: ...


@dataclass(slots=True)
class _Asked:
    """A turn of a session that waits or runs, and what was said before it."""

    session: Session
    turn: int
    history: list[Message]
    record: Record


class Replay:
    """Replays sessions on one engine.

    ``clock``: what a step takes. The CPU time of the thread that steps (the default) leaves out the
    time in which other programs had the CPU.
    """

    def __init__(
        self,
        llm: Stepped,
        *,
        chat: bool = False,
        clock: Callable[[], float] = time.thread_time,
        sampling: SamplingParams | None = None,
    ) -> None:
        self._llm = llm
        self._chat = chat
        self._clock = clock
        self._params = (sampling or SamplingParams(temperature=0, ignore_eos=True)).clone(
            output_kind=RequestOutputKind.DELTA
        )

    def run(
        self, sessions: Sequence[Session], enough: Callable[[Sequence[Record]], bool] | None = None
    ) -> list[Record]:
        """The records of all requests, in the order in which they ended.

        ``enough``: called when a request ends; if it returns true, the rest is aborted.
        """
        order = itertools.count()
        due: list[tuple[float, int, _Asked]] = []

        def ask(at: float, session: Session, turn: int, history: list[Message]) -> None:
            heapq.heappush(due, (at, next(order), _Asked(session, turn, history, Record(at))))

        for session in sessions:
            ask(session.at, session, 0, list(session.opening))
        running: dict[str, _Asked] = {}
        ended: list[Record] = []
        now = 0.0
        while due or running:
            if not running:
                now = max(now, due[0][0])
            begin = self._clock()
            while due and due[0][0] <= now:
                asked = heapq.heappop(due)[2]
                asked.record.sent = now
                self._enqueue(asked, running, ended)
            outputs = self._llm.step() if running else []
            now += self._clock() - begin
            for output in outputs:
                asked = running[output.request_id]
                self._note(output, asked.record, now)
                if not output.finished:
                    continue
                del running[output.request_id]
                ended.append(asked.record)
                turn = asked.turn + 1
                if turn < len(asked.session.turns) and asked.record.error is None:
                    said = {"role": "assistant", "content": asked.record.answer}
                    ask(now + asked.session.think_s, asked.session, turn, [*asked.history, said])
                if enough is not None and enough(ended):
                    self._abort(running)
                    return ended
        return ended

    def _enqueue(self, asked: _Asked, running: dict[str, _Asked], ended: list[Record]) -> None:
        turn = asked.session.turns[asked.turn]
        asked.history.append({"role": "user", "content": str(turn.text)})
        prompt = prompt_of(asked.history, chat=self._chat)
        params = self._params.clone(max_tokens=turn.output_len)
        try:
            (request_id,) = self._llm.enqueue(prompt, params)
        except SdkError as error:
            asked.record.error, asked.record.last = type(error).__name__, asked.record.sent
            ended.append(asked.record)
        else:
            running[request_id] = asked

    def _note(self, output: RequestOutput, record: Record, now: float) -> None:
        answer = output.outputs[0]
        record.output_tokens += len(answer.token_ids)
        if answer.text:
            record.add(now, answer.text)
        if output.finished:
            record.prompt_tokens = len(output.prompt_token_ids)
            record.end(now)
            if answer.finish_reason not in ("stop", "length"):
                record.error, record.last = f"finish reason {answer.finish_reason}", now

    def _abort(self, running: dict[str, _Asked]) -> None:
        """End what runs, so that the next replay begins with an idle engine."""
        self._llm.abort(list(running))
        while running:
            for output in self._llm.step():
                if output.finished:
                    running.pop(output.request_id, None)
