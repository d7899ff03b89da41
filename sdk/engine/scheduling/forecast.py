"""Looks ahead: when a request would get its first token and its last, if it came now."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sdk.engine.scheduling.step_times import StepTimes
from sdk.kernels.dataclass import dataclass

#: Requests before the one in question that are simulated one by one. Those after them take as long
#: on average: simulating 10,000 would take 0.1 s.
_MOST_SIMULATED = 256


@dataclass(slots=True)
class Work:
    """What is left of a request: tokens of its prompt after ``context`` ones, then of its answer.
    ``slots`` that it takes."""

    prompt: int
    context: int
    answer: float
    slots: int = 1


def forecast(
    times: StepTimes,
    running: Sequence[Work],
    ahead: Sequence[Work],
    own: Work,
    behind: Sequence[Work],
    *,
    max_num_seqs: int,
    step_tokens: int,
) -> tuple[float, float]:
    """Seconds until ``own`` has its first token, and until it ends.

    ``running`` and ``own`` if nothing is ``ahead`` and slots are free run at once; the others start
    in their order when slots are free. Pages are taken to be enough.
    """
    left_out = ahead[_MOST_SIMULATED:]
    simulation = _Simulation(times, max_num_seqs, step_tokens)
    for work in running:
        simulation.start(work)
    waiting = [*ahead[:_MOST_SIMULATED], own, *behind[:_MOST_SIMULATED]]
    first, finish = simulation.run(waiting, own)
    if left_out:
        more = first * len(left_out) / _MOST_SIMULATED
        first, finish = first + more, finish + more
    return first, finish


class _Simulation:
    """Steps, many at a time. ``tick``: tokens that a decoding request has got since the start."""

    def __init__(self, times: StepTimes, max_num_seqs: int, step_tokens: int) -> None:
        self._times = times
        self._free = max_num_seqs
        self._step_tokens = step_tokens
        self._now = 0.0
        self._tick = 0.0
        self._rows = 0
        self._prompts: list[Work] = []  # in progress, first to last
        self._ends: list[tuple[float, int, Work]] = []  # heap of decoding requests by tick
        self._count = 0

    def start(self, work: Work) -> None:
        self._free -= work.slots
        if work.prompt > 0:
            self._prompts.append(work)
        else:
            self._decode(work)

    def _decode(self, work: Work) -> None:
        self._count += 1
        self._rows += work.slots
        heapq.heappush(self._ends, (self._tick + work.answer, self._count, work))

    def run(self, waiting: Sequence[Work], own: Work) -> tuple[float, float]:
        """The times of the first and the last token of ``own``, which is one of ``waiting``."""
        first, index = 0.0, 0
        while True:
            while index < len(waiting) and (
                waiting[index].slots <= self._free or not (self._prompts or self._ends)
            ):
                self.start(waiting[index])
                index += 1
            done = self._run_prompts() if self._prompts else self._run_decodes()
            for work in done:
                if work is own:
                    if first or not own.answer:
                        return first or self._now, self._now
                    first = self._now

    def _run_prompts(self) -> list[Work]:
        """One step with prompts; the requests that got their first or their last token."""
        budget, done = max(self._step_tokens - self._rows, 1), []
        seconds = self._times.decode(self._rows) or self._times.fixed()
        rows = self._rows
        while self._prompts and budget:
            work = self._prompts[0]
            num = min(work.prompt, budget)
            seconds += self._times.prompt(num, work.context)
            budget -= num
            work.prompt, work.context = work.prompt - num, work.context + num
            if not work.prompt:
                done.append(self._prompts.pop(0))
        self._now += seconds
        if rows:
            self._tick += self._times.tokens_per_row
        ended = self._ended()
        for work in done:
            if work.answer > 1:
                work.answer -= 1
                self._decode(work)
            else:
                work.answer = 0
                self._free += work.slots
        return [*done, *ended]

    def _run_decodes(self) -> list[Work]:
        """Steps until the next request ends."""
        tokens = max(self._ends[0][0] - self._tick, 0.0)
        self._now += tokens / self._times.tokens_per_row * self._times.decode(self._rows)
        self._tick += tokens
        return self._ended()

    def _ended(self) -> list[Work]:
        done = []
        while self._ends and self._ends[0][0] <= self._tick + 1e-9:
            work = heapq.heappop(self._ends)[2]
            self._rows -= work.slots
            self._free += work.slots
            done.append(work)
        return done
